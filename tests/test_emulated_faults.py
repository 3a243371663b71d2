"""Broken programs must be noticed: faults of synchronisation and addressing, put into the shipped programs.

Needs `--backend=emulated`. Which faults there are: ptx_emulator/faults.py; what noticed them: docs/ptx_emulator.md.
"""

import cases
import oracle
import pytest
import torch
from ptx_emulator import faults

import m3_sparse
from m3_sparse import ops

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
UNION = 1  # of launch/prefill.h


def attend(splits, kv):
    case = cases.make([1, 1], [2100, 700], heads=(16, 1), dtype=BF16, kv_dtype=kv, style="clean", topk=12, seed=5)
    (q, k_cache, v_cache, ids, table), options = case.sparse()
    lengths = (options["cu_seqlens_q"], options["seqused_k"])

    def run():
        out, lse = cases.nan_like(q.shape, q.dtype), cases.nan_like(q.shape[:2], torch.float32)
        call = ops.BUILT["sparse_attention", "aot"]
        call(out, lse, q, k_cache, v_cache, ids, table, *lengths, 128**-0.5, True, None, None, splits)
        return out, lse

    return run


def select(blocks, kv):
    case = cases.make([7, 5], [128 * blocks, 300], heads=(4, 4), dtype=BF16, kv_dtype=kv, seed=blocks)
    (query, keys, table), lengths = case.index()
    tied = torch.ones_like(keys) * (torch.arange(len(keys)) % 3)[:, None, None].to(keys.dtype)  # three scores a row

    def run():
        with m3_sparse.backend("aot"):
            results = [m3_sparse.select_blocks(query, k, table, **lengths, return_scores=True) for k in (keys, tied)]
        return [x for pair in results for x in pair]

    return run


def attend_on_blackwell(emulation, formulation):
    """All tiles in one CTA; KV-stationary in chunks that are combined beside the next."""
    case = cases.make([14, 5, 9], [500, 77, 300], heads=(16, 1), dtype=BF16, kv_dtype=E4M3, page=64, topk=4, seed=5)
    (q, k_cache, v_cache, ids, table), options = case.sparse()
    lengths = (options["cu_seqlens_q"], options["seqused_k"])
    pipeline = emulation.wrapped(getattr(ops, "ops", ops).aot_sparse_attention_kv_stationary.default)

    def run():
        out, lse = cases.nan_like(q.shape, q.dtype), cases.nan_like(q.shape[:2], torch.float32)
        arguments = (out, lse, q, k_cache, v_cache, ids, table, *lengths, 128**-0.5, True, None, None)
        with emulation.device("sm_100", 1):
            if formulation == "union":
                ops.BUILT["sparse_attention", "aot"](*arguments, 0, True, UNION)
            else:
                pipeline(*arguments, None, 8, 1)
        return out, lse

    return run


PROGRAMS = {
    "decode_bf16_s2": attend(2, BF16), "decode_e4m3_s4": attend(4, E4M3), "decode_bf16_s16": attend(16, BF16),
    "decode_score_bf16_bf16_n32": select(40, BF16), "decode_score_bf16_e4m3_n32": select(40, E4M3),
    "topk_narrow": select(250, BF16),
}  # fmt: skip
# Of all, and of one program: some faults change nothing, such as a wait for copies that others have waited for already.
# Top-k's maxima and counts only bound what it looks at: a neighbour's instead changes the work, rarely the selection.
NOTICED, NOTICED_OF_ONE, NOTICED_OF_TOPK = 0.85, 0.8, 0.5
found = {}  # program -> [(mutant, what noticed it or None)]


def same(got, want):
    return all(torch.equal(oracle.stored_bytes(a), oracle.stored_bytes(b)) for a, b in zip(got, want))


def verdicts(emulation, name, run, arch="sm90a"):
    driver = emulation.driver
    entry = f"m3s_{name}_{arch}_0"
    want = run()
    text = (driver.kernels / f"{driver.manifests[entry]['name']}.ptx").read_text()
    result = []
    for mutant in faults.mutants(text, driver.programs[entry]):

        def check(changed, policy):
            driver.edit = lambda original: changed if original == text else original
            emulation.reports = []
            before, driver.policy = driver.policy, faults.limited(policy)
            try:
                got = run()
            finally:
                driver.edit, driver.policy = None, before
            return same(got, want), emulation.reports

        result.append((mutant, faults.judge(check, mutant)))
    return result


@pytest.mark.parametrize("name", PROGRAMS)
def test_faults_are_noticed(emulation, name):
    found[name] = verdicts(emulation, name, PROGRAMS[name])
    missed = [(m.kind, m.line) for m, by in found[name] if by is None]
    print(faults.table(found[name]), missed)
    assert len(found[name]) >= 6
    least = NOTICED_OF_TOPK if name.startswith("topk") else NOTICED_OF_ONE
    assert len(missed) <= (1 - least) * len(found[name]), missed


@pytest.mark.parametrize("name", ["prefill_bf16_e4m3_r16", "prefill_union_e4m3"])
def test_faults_on_blackwell_are_noticed(emulation, name):
    run = attend_on_blackwell(emulation, "union" if "union" in name else "kv_stationary")
    verdict = verdicts(emulation, name, run, "sm100a")
    missed = [(m.kind, m.line) for m, by in verdict if by is None]
    print(faults.table(verdict), missed)
    assert len(verdict) >= 80 and len(missed) <= 0.05 * len(verdict), missed


def test_most_of_all_faults_are_noticed():
    """The last test of this file."""
    every = [pair for name in PROGRAMS for pair in found[name]]
    print(faults.table(every))
    assert len(every) >= 60
    assert sum(by is not None for _, by in every) >= NOTICED * len(every)
