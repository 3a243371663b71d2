"""Broken programs must be noticed: faults of synchronisation and addressing, put into the shipped programs.

Needs `--backend=emulated`, and `--faults` for the large programs, whose mutants take minutes, and for the faults that are
declared harmless (harmless_faults.py). Which faults there are: ptx_emulator/faults.py; the figures: docs/mutation.md, made of
what a run with `--faults` leaves (`make mutants`). What noticed them, and what passed:

    python tests/ptx_emulator/faults.py
"""

import contextlib
import functools
import json
from pathlib import Path

import cases
import harmless_faults
import oracle
import prefill_problems as problems
import pytest
import torch
from ptx_emulator import faults

import m3_sparse
from m3_sparse import ops

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
STORED, FUSED = 2, 3  # ways of select_blocks
UNION, BY_REQUEST = 1, 4  # formulations of sparse_attention


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
    """With 32 ids every place of a list counts. Then scores below zero, and ties among the blocks of one warp's share."""
    case = cases.make([7, 5], [128 * blocks, 300], heads=(4, 4), dtype=BF16, kv_dtype=kv, seed=blocks)
    (query, keys, table), lengths = case.index()
    tied = torch.ones_like(keys) * (torch.arange(len(keys)) % 3)[:, None, None].to(keys.dtype)  # three scores a row

    def selected(query, caches, topks):
        def run(emulation):
            with m3_sparse.backend("aot"):
                results = [
                    m3_sparse.select_blocks(query, k, table, topk=topk, **lengths, return_scores=True)
                    for topk in topks
                    for k in caches
                ]
            return [x for pair in results for x in pair]

        return run

    def best(first):
        """All blocks from the first on score the same, and more than the others."""
        cache = torch.zeros_like(keys)
        cache[table[0, first:blocks].long()] = torch.ones((), dtype=keys.dtype)
        return cache

    above, below = query.abs(), (-keys.float().abs()).to(keys.dtype)
    share = -(-blocks // 128) * 32
    more = [selected(above, [below, *(best(share * warp) for warp in (1, 2, 3))], topks[:1])]
    return [selected(query, (keys, tied), topks), *more]


def attended(problem, formulation):
    """One formulation of sparse attention; None: KV-stationary in chunks that are combined beside the next."""
    case = problem.case
    (q, k_cache, v_cache, _, table), options = case.sparse()
    lengths, scales = (options["cu_seqlens_q"], options["seqused_k"]), (options["k_scale"], options["v_scale"])
    scale = 128**-0.5 if problem.scale is None else problem.scale
    call = getattr(ops, "ops", ops).aot_sparse_attention_kv_stationary.default

    def run(emulation):
        out, lse = cases.nan_like(q.shape, q.dtype), cases.nan_like(q.shape[:2], torch.float32)
        arguments = (out, lse, q, k_cache, v_cache, problem.ids, table, *lengths, scale, problem.causal, *scales)
        if formulation is None:
            emulation.wrapped(call)(*arguments, None, 8, 1)
        else:
            ops.BUILT["sparse_attention", "aot"](*arguments, 0, True, formulation)
        return out, lse

    return run


def blemished(page, heads, kv):
    """A NaN or infinity in V, which some of a tile's tokens see: it is computed again for the others."""
    problem, places = problems.blemished(page, heads, BF16, kv)
    case = problem.case
    problems.spoil(case, case.v_cache, places, problems.kinds(kv))
    return problem


def crowded(group, kv):
    """Tiles enough of one whole block to fill the ring of Q, which 40 tokens lie in; a NaN in V of one of its two heads, in
    a row that the last of the widening warps looks at."""
    case = cases.make([40], [512], heads=(2 * group, 2), dtype=BF16, kv_dtype=kv, topk=4, style="clean", seed=2)
    for first, chosen in enumerate(([0, 3], [1, 3], [0, 3], [0, 1, 3])):
        case.ids[first::4] = torch.tensor(chosen + [-1] * (4 - len(chosen)), dtype=torch.int32)
    problems.spoil(case, case.v_cache, {0: [(494, 64)]}, problems.kinds(kv))
    return problems.Problem(case, case.ids)


def apart(group, kv):
    """Four chunks; the last tile of each is the only one of its block, which is whole and seen by all its tokens."""
    case = cases.make([18], [530], heads=(4 * group, 4), dtype=BF16, kv_dtype=kv, style="clean", topk=4, seed=3)
    case.ids[...] = torch.tensor([0, 1, 2, -1], dtype=torch.int32)
    case.ids[:3, :, 2] = 3
    return problems.Problem(case, case.ids)


def uneven(first, second, last, kv, scale=None):
    """Half of a tile passes on what the other half has chosen; the last tile, the first to be taken, has one block or none."""
    problem = problems.halves(first, second, BF16, kv)
    problem.ids[16:] = -1
    problem.ids[16:, :, 0] = last
    return problem._replace(scale=scale)


def prefill(q_lens, kv_lens, heads, kv, union):
    """Tokens enough for several tiles of each block, or several union tiles: the rings of one CTA come round."""
    case = cases.make(q_lens, kv_lens, heads=heads, dtype=BF16, kv_dtype=kv, style="clean", topk=8, seed=3, page=64)
    group = heads[0] // heads[1]
    more = [blemished(64, (2 * group, 2), kv), crowded(group, kv)]
    more += [problems.attention(f"outside, 64, group of {group}", (BF16, kv))]
    if union:
        more += [uneven([0, 12], [1, 2, 3, 4, 5, 6, 7, 8], -1, kv, -0.2)]
        more += [uneven([2, 3, 4, 5, 8, 9, 11], [0, 1, 4, 7, 10], 3, kv)]
        more += [uneven([8, 9, 10, 11], [0, 1, 2, 3, 4, 5, 6, 7], -1, kv), uneven([0, 1], [5, 6, 7, 8, 9, 10], 3, kv)]
    else:
        more += [problems.attention(f"scale -0.2, group of {group}", (BF16, kv)), apart(group, kv)]
    return [attended(problem, UNION if union else None) for problem in (problems.Problem(case, case.ids), *more)]


def listed(group, formulation):
    """What the lists say is seen in what the kernels behind them make of it. Several units of 256 tokens, or union tiles, and
    requests across their borders; the first request's tokens agree on their blocks, so that it takes union tiles."""
    q_lens = [250, 3, 20] if formulation is None else [25, 3, 20]
    found = []
    for page, style in ((128, "clean"), (64, "wild")):
        case = cases.make(
            q_lens, [255, 400, 570], heads=(2 * group, 2), dtype=BF16, topk=3, style=style, page=page, seed=4
        )
        case.ids[: q_lens[0]] = case.ids[:1] % 2
        found.append(attended(problems.Problem(case, case.ids), formulation))
    return found


def combined(group):
    """Rows that fill every place of a list, and rows of few blocks; more than a chunk."""
    case = cases.make([7, 3], [2100, 400], heads=(group, 1), dtype=BF16, style="clean", topk=16, seed=3)
    case.ids[:7] = torch.arange(16, dtype=torch.int32)
    return [attended(problems.Problem(case, case.ids), None)]


def dense(q_lens, kv_lens):
    """Then a negative scale, all of a request's keys seen by all rows, and pages outside the cache. Then references that move."""
    case = cases.make(q_lens, kv_lens, heads=(16, 1), dtype=BF16, seed=3)
    other = cases.make(q_lens, kv_lens, heads=(16, 1), dtype=BF16, seed=4, page=64)
    other.block_table[0, 2], other.block_table[0, 5] = -1, other.k_cache.shape[0]

    def attended(case, scale, causal):
        (q, k_cache, v_cache, table), options = case.dense()
        lengths = (options["cu_seqlens_q"], options["seqused_k"])

        def run(emulation):
            out, lse = cases.nan_like(q.shape, q.dtype), cases.nan_like(q.shape[:2], torch.float32)
            call = ops.BUILT["dense_attention", "aot"]
            call(out, lse, q, k_cache, v_cache, table, *lengths, scale, causal, None, None, 1)
            return out, lse

        return run

    moving = [problems.apart(2 * q_lens[0], BF16, falling) for falling in (False, True)]
    scaled = [attended(each, 128**-0.5, True) for each in (case, *moving)]
    return [scaled[0], attended(other, -0.2, False), *scaled[1:]]


def scored(tensors, lengths, way, topk, local=0, init=0):
    query, keys, table = tensors

    def run(emulation):
        out = torch.full((*query.shape[:2], topk), -77, dtype=torch.int32)
        shape = (*query.shape[:2], -(-table.shape[1] * keys.shape[1] // 128))
        scores = cases.nan_like(shape, torch.float32) if way == STORED else None
        ops.BUILT["select_blocks", "aot"](out, scores, query, keys, table, *lengths.values(), local, init, way)
        return (out, scores) if way == STORED else (out,)

    return run


def prefill_score(q, kv, way, topk):
    """Tiles of few blocks, so that nothing but its own barrier keeps a tile's queries; a page outside the cache. Then pages
    outside within blocks that the mask cuts; prompts beside decode tokens; tiles of which one CTA has all blocks."""
    make = functools.partial(cases.make, dtype=q, kv_dtype=kv)
    few, lengths = make([70, 40, 30], [2900, 400, 300], heads=(4, 4), seed=3, page=64).index()
    few[2][0, 5] = -1
    cut, its_lengths = make([50], [1900], heads=(4, 4), seed=5, page=64).index()
    for at, page in ((3, -5), (8, cut[1].shape[0]), (28, -7)):
        cut[2][0, at] = page
    alone = make([0] * 36 + [3, 1, 0, 2], [0] * 36 + [2126, 2126, 0, 2254], heads=(1, 1)).index()
    own = make([300, 270], [777, 966], heads=(1, 1), seed=3, page=64).index()  # a tile's rows lie in several blocks
    return [
        scored(few, lengths, way, topk), scored(cut, its_lengths, way, 4), scored(*alone, way, 16, 8, 7),
        scored(*problems.scoring(64, (q, kv)), way, 3), scored(*own, way, 3),
    ]  # fmt: skip


bind = functools.partial  # problems are built when a test asks for them
PROGRAMS = {
    "decode_bf16_s2": bind(attend, 2, BF16), "decode_e4m3_s4": bind(attend, 4, E4M3), "decode_bf16_s16": bind(attend, 16, BF16),
    "decode_score_bf16_bf16_n32": bind(select, 40, BF16), "decode_score_bf16_e4m3_n32": bind(select, 40, E4M3),
    "topk_narrow": bind(select, 250, BF16, (8, 16, 32)),
}  # fmt: skip
LARGE = {
    "invert_count": bind(listed, 1, None), "invert_scan": bind(listed, 1, None), "invert_scatter": bind(listed, 1, None),
    "union_lists": bind(listed, 16, UNION), "union_choice": bind(listed, 16, BY_REQUEST),
    "prefill_bf16_bf16_r16": bind(prefill, [45, 5], [300, 200], (16, 1), BF16, False),
    "prefill_bf16_e4m3_r8": bind(prefill, [70, 5], [300, 200], (8, 1), E4M3, False),
    "prefill_union_bf16": bind(prefill, [11, 5], [900, 200], (16, 1), BF16, True),
    "prefill_union_e4m3": bind(prefill, [11, 5], [900, 200], (16, 1), E4M3, True),
    "dense_bf16_m64": bind(dense, [2, 1], [700, 200]), "dense_bf16_m128": bind(dense, [20, 5], [700, 200]),
    "prefill_score_bf16_bf16_scores": bind(prefill_score, BF16, BF16, STORED, 2),
    "prefill_score_bf16_e4m3_top16": bind(prefill_score, BF16, E4M3, FUSED, 2),
    "prefill_score_e4m3_e4m3_top16": bind(prefill_score, E4M3, E4M3, FUSED, 2),
    "prefill_combine_bf16_r16": bind(combined, 16),
    "topk_wide": bind(select, 1000, BF16, (8, 16, 32)),
}  # fmt: skip
BLACKWELL = {  # all tiles in one CTA
    "prefill_bf16_e4m3_r16": bind(prefill, [14, 5, 9], [500, 77, 300], (16, 1), E4M3, False),
    "prefill_union_e4m3": bind(prefill, [14, 5, 9], [500, 77, 300], (16, 1), E4M3, True),
}  # fmt: skip
LARGE_BLACKWELL = {"prefill_score_bf16_e4m3_top16": bind(prefill_score, BF16, E4M3, FUSED, 2)}
# CTAs of those that take any number: few, so that each has several tiles and its rings come round.
PERSISTENT = {name: 2 if "score" in name else 1 for name in LARGE if name.startswith("prefill")}


def same(got, want):
    return all(torch.equal(oracle.stored_bytes(a), oracle.stored_bytes(b)) for a, b in zip(got, want))


def problems_of(name, arch="sm90a"):
    found = ({**BLACKWELL, **LARGE_BLACKWELL} if arch == "sm100a" else {**PROGRAMS, **LARGE})[name]()
    return found if isinstance(found, list) else [found]


def verdicts(emulation, name, arch, policies=lambda mutant: faults.POLICIES):
    """Mutants of what the problems execute, and what notices each. Another problem is for what passes those before it."""
    tried = problems_of(name, arch)
    driver, entry = emulation.driver, f"m3s_{name}_{arch}_0"
    driver.most_ctas = {entry: PERSISTENT.get(name, 1 << 30)} if arch == "sm90a" else {}
    text = (driver.kernels / f"{driver.manifests[entry]['name']}.ptx").read_text()

    def attempt(problem, changed, policy):
        driver.edit = lambda original: changed if original == text else original
        emulation.reports = []
        before, driver.policy = driver.policy, faults.limited(policy)
        try:
            with emulation.device("sm_100", 1) if arch == "sm100a" else contextlib.nullcontext():
                return problem(emulation), emulation.reports
        finally:
            driver.edit, driver.policy = None, before

    whole = text + f"// {name}, of which nothing else has counted what it runs\n"
    wants = [attempt(problem, whole, "eager")[0] for problem in tried]
    program, passed = driver.programs[entry], set()

    def trial(number, changed, policy):
        """The program itself passes what its mutants are judged by."""
        if (number, policy) not in passed:
            got, reports = attempt(tried[number], faults.varied(text, policy), policy)
            assert same(got, wants[number]) and not reports, (number, policy, reports)
            passed.add((number, policy))
        got, reports = attempt(tried[number], changed, policy)
        return same(got, wants[number]), reports

    runs = [functools.partial(trial, number) for number in range(len(tried))]
    mutants = faults.mutants(text, program)
    return [(mutant, faults.judge(runs, mutant, policies(mutant))) for mutant in mutants]


def check(emulation, name, arch, everything):
    """Each mutant is noticed, or else declared harmless. `everything`: the latter are tried too, for as long as they take."""
    title = name if arch == "sm90a" else f"{name} on SM100"
    few = faults.POLICIES[: 2 if everything else 0]
    verdict = verdicts(emulation, name, arch, lambda m: few if harmless_faults.declared(title, m) else faults.POLICIES)
    entries = [harmless_faults.declared(title, mutant) for mutant, _ in verdict]
    if everything:
        faults.record(title, verdict, [entry and entry.why for entry in entries])
    print(faults.table([pair for pair, entry in zip(verdict, entries) if not entry]))
    assert len(verdict) >= 3
    missed = [(m.kind, m.line, m.around) for (m, by), entry in zip(verdict, entries) if by is None and entry is None]
    assert not missed, "noticed by nothing"
    if everything:
        noticed = [(m.kind, m.line, by) for (m, by), entry in zip(verdict, entries) if by is not None and entry]
        assert not noticed, "declared harmless, but noticed"
        gone = [entry for entry in harmless_faults.HARMLESS if entry.of(title) and entry not in entries]
        assert not gone, "declared harmless, but no longer there"


def large(names):
    return [pytest.param(name, marks=pytest.mark.faults) for name in names]


@pytest.mark.parametrize("name", [*PROGRAMS, *large(LARGE)])
def test_faults_are_noticed(emulation, name, pytestconfig):
    check(emulation, name, "sm90a", pytestconfig.getoption("--faults"))


@pytest.mark.parametrize("name", [*BLACKWELL, *large(LARGE_BLACKWELL)])
def test_faults_on_blackwell_are_noticed(emulation, name, pytestconfig):
    check(emulation, name, "sm100a", pytestconfig.getoption("--faults"))


def test_the_table_has_these_programs():
    """docs/mutation.md is made of these figures."""
    path = Path(__file__).resolve().parent.parent / "docs" / "measurements" / "mutation.json"
    names = {*PROGRAMS, *LARGE, *(f"{name} on SM100" for name in (*BLACKWELL, *LARGE_BLACKWELL))}
    assert json.loads(path.read_text())["kernels"].keys() == names
