"""Broken programs must be noticed: faults of synchronisation and addressing, put into the shipped programs.

Needs `--backend=emulated`, and `--faults` for the large programs, whose mutants take minutes. Which faults there are:
ptx_emulator/faults.py; what noticed them: docs/ptx_emulator.md. The tables there, after a run with `--faults`:

    python tests/ptx_emulator/faults.py
"""

import cases
import oracle
import pytest
import torch
from ptx_emulator import faults

import m3_sparse
from m3_sparse import ops

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
STORED, FUSED = 2, 3  # ways of select_blocks
UNION = 1  # a formulation of sparse_attention


def attend(splits, kv):
    """Half a block lies outside the cache: what is cleared instead lies where the next block is copied to."""
    case = cases.make(
        [1, 1], [2100, 700], heads=(16, 1), dtype=BF16, kv_dtype=kv, page=64, style="clean", topk=16, seed=5
    )
    (q, k_cache, v_cache, ids, table), options = case.sparse()
    ids[0, 0] = torch.arange(16)
    table[0, 0], table[0, 9] = -1, -1
    lengths = (options["cu_seqlens_q"], options["seqused_k"])

    def run(emulation):
        out, lse = cases.nan_like(q.shape, q.dtype), cases.nan_like(q.shape[:2], torch.float32)
        call = ops.BUILT["sparse_attention", "aot"]
        call(out, lse, q, k_cache, v_cache, ids, table, *lengths, 128**-0.5, True, None, None, splits)
        return out, lse

    return run


def select(blocks, kv, topks=(16,)):
    """With 32 ids every place of a list counts."""
    case = cases.make([7, 5], [128 * blocks, 300], heads=(4, 4), dtype=BF16, kv_dtype=kv, seed=blocks)
    (query, keys, table), lengths = case.index()
    tied = torch.ones_like(keys) * (torch.arange(len(keys)) % 3)[:, None, None].to(keys.dtype)  # three scores a row

    def run(emulation):
        with m3_sparse.backend("aot"):
            results = [
                m3_sparse.select_blocks(query, k, table, topk=topk, **lengths, return_scores=True)
                for topk in topks
                for k in (keys, tied)
            ]
        return [x for pair in results for x in pair]

    return run


def prefill(q_lens, kv_lens, heads, kv, union):
    """Tokens enough for several tiles of each block, or several union tiles: the rings of one CTA come round."""
    case = cases.make(q_lens, kv_lens, heads=heads, dtype=BF16, kv_dtype=kv, style="clean", topk=8, seed=3, page=64)
    (q, k_cache, v_cache, ids, table), options = case.sparse()
    lengths = (options["cu_seqlens_q"], options["seqused_k"])
    call = None if union else getattr(ops, "ops", ops).aot_sparse_attention_kv_stationary.default

    def run(emulation):
        out, lse = cases.nan_like(q.shape, q.dtype), cases.nan_like(q.shape[:2], torch.float32)
        arguments = (out, lse, q, k_cache, v_cache, ids, table, *lengths, 128**-0.5, True, None, None)
        if union:
            ops.BUILT["sparse_attention", "aot"](*arguments, 0, True, UNION)
        else:
            emulation.wrapped(call)(*arguments, None, 8, 1)
        return out, lse

    return run


def dense(q_lens, kv_lens):
    case = cases.make(q_lens, kv_lens, heads=(16, 1), dtype=BF16, seed=3)
    (q, k_cache, v_cache, table), options = case.dense()
    lengths = (options["cu_seqlens_q"], options["seqused_k"])

    def run(emulation):
        out, lse = cases.nan_like(q.shape, q.dtype), cases.nan_like(q.shape[:2], torch.float32)
        call = ops.BUILT["dense_attention", "aot"]
        call(out, lse, q, k_cache, v_cache, table, *lengths, 128**-0.5, True, None, None, 1)
        return out, lse

    return run


def prefill_score(q, kv, way, topk):
    """Tiles of few blocks, so that nothing but its own barrier keeps a tile's queries; a page outside the cache."""
    case = cases.make([70, 40, 30], [2900, 400, 300], heads=(4, 4), dtype=q, kv_dtype=kv, seed=3, page=64)
    (query, keys, table), lengths = case.index()
    table[0, 5] = -1

    def run(emulation):
        out = torch.full((*query.shape[:2], topk), -77, dtype=torch.int32)
        shape = (*query.shape[:2], -(-table.shape[1] * keys.shape[1] // 128))
        scores = cases.nan_like(shape, torch.float32) if way == STORED else None
        ops.BUILT["select_blocks", "aot"](out, scores, query, keys, table, *lengths.values(), 0, 0, way)
        return (out, scores) if way == STORED else (out,)

    return run


def attend_on_blackwell(formulation):
    """All tiles in one CTA; KV-stationary in chunks that are combined beside the next."""
    case = cases.make([14, 5, 9], [500, 77, 300], heads=(16, 1), dtype=BF16, kv_dtype=E4M3, page=64, topk=4, seed=5)
    (q, k_cache, v_cache, ids, table), options = case.sparse()
    lengths = (options["cu_seqlens_q"], options["seqused_k"])
    call = getattr(ops, "ops", ops).aot_sparse_attention_kv_stationary.default

    def run(emulation):
        out, lse = cases.nan_like(q.shape, q.dtype), cases.nan_like(q.shape[:2], torch.float32)
        arguments = (out, lse, q, k_cache, v_cache, ids, table, *lengths, 128**-0.5, True, None, None)
        with emulation.device("sm_100", 1):
            if formulation == "union":
                ops.BUILT["sparse_attention", "aot"](*arguments, 0, True, UNION)
            else:
                emulation.wrapped(call)(*arguments, None, 8, 1)
        return out, lse

    return run


PROGRAMS = {
    "decode_bf16_s2": attend(2, BF16), "decode_e4m3_s4": attend(4, E4M3), "decode_bf16_s16": attend(16, BF16),
    "decode_score_bf16_bf16_n32": select(40, BF16), "decode_score_bf16_e4m3_n32": select(40, E4M3),
    "topk_narrow": select(250, BF16, (8, 16, 32)),
}  # fmt: skip
LARGE = {
    "prefill_bf16_bf16_r16": prefill([45, 5], [300, 200], (16, 1), BF16, False),
    "prefill_bf16_e4m3_r8": prefill([70, 5], [300, 200], (8, 1), E4M3, False),
    "prefill_union_bf16": prefill([11, 5], [900, 200], (16, 1), BF16, True),
    "prefill_union_e4m3": prefill([11, 5], [900, 200], (16, 1), E4M3, True),
    "dense_bf16_m64": dense([2, 1], [700, 200]), "dense_bf16_m128": dense([20, 5], [700, 200]),
    "prefill_score_bf16_bf16_scores": prefill_score(BF16, BF16, STORED, 2),
    "prefill_score_bf16_e4m3_top16": prefill_score(BF16, E4M3, FUSED, 2),
    "prefill_score_e4m3_e4m3_top16": prefill_score(E4M3, E4M3, FUSED, 2),
}  # fmt: skip
# CTAs of those that take any number: few, so that each has several tiles and its rings come round.
PERSISTENT = {name: 2 if "score" in name else 1 for name in LARGE if "dense" not in name}
# Of all, and of one program: some faults change nothing, such as a wait for copies that others have waited for already.
NOTICED, NOTICED_OF_ONE = 0.9, 0.8
found = {}  # program -> [(mutant, what noticed it or None)]


def same(got, want):
    return all(torch.equal(oracle.stored_bytes(a), oracle.stored_bytes(b)) for a, b in zip(got, want))


def verdicts(emulation, name, run, arch="sm90a"):
    driver, entry = emulation.driver, f"m3s_{name}_{arch}_0"
    driver.most_ctas = {entry: PERSISTENT.get(name, 1 << 30)} if arch == "sm90a" else {}
    want = run(emulation)
    text = (driver.kernels / f"{driver.manifests[entry]['name']}.ptx").read_text()
    result = []
    for mutant in faults.mutants(text, driver.programs[entry]):

        def check(changed, policy):
            driver.edit = lambda original: changed if original == text else original
            emulation.reports = []
            before, driver.policy = driver.policy, faults.limited(policy)
            try:
                got = run(emulation)
            finally:
                driver.edit, driver.policy = None, before
            return same(got, want), emulation.reports

        result.append((mutant, faults.judge(check, mutant)))
    faults.record(name if arch == "sm90a" else f"{name} on SM100", result)
    return result


@pytest.mark.parametrize("name", [*PROGRAMS, *(pytest.param(name, marks=pytest.mark.faults) for name in LARGE)])
def test_faults_are_noticed(emulation, name):
    found[name] = verdicts(emulation, name, {**PROGRAMS, **LARGE}[name])
    missed = [(m.kind, m.line) for m, by in found[name] if by is None]
    print(faults.table(found[name]), missed)
    assert len(found[name]) >= 6
    assert len(missed) <= (1 - NOTICED_OF_ONE) * len(found[name]), missed


@pytest.mark.parametrize("name", ["prefill_bf16_e4m3_r16", "prefill_union_e4m3"])
def test_faults_on_blackwell_are_noticed(emulation, name):
    run = attend_on_blackwell("union" if "union" in name else "kv_stationary")
    verdict = verdicts(emulation, name, run, "sm100a")
    missed = [(m.kind, m.line) for m, by in verdict if by is None]
    print(faults.table(verdict), missed)
    assert len(verdict) >= 80 and len(missed) <= 0.05 * len(verdict), missed


def test_most_of_all_faults_are_noticed():
    """The last test of this file."""
    every = [pair for verdicts in found.values() for pair in verdicts]
    print(faults.table(every))
    assert found.keys() >= PROGRAMS.keys() and len(every) >= 60
    assert sum(by is not None for _, by in every) >= NOTICED * len(every)
