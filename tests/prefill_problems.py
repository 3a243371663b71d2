"""The grid of small problems that each architecture's own programs must solve: sparse prefill, scoring, dense attention.

One grid for all: SM90's, SM100's and SM103's programs in the PTX emulator (tests/test_emulated_prefill*.py,
test_emulated_dense.py), and those of the GPU that is there (tests/gpu/test_prefill_grid_gpu.py), against the float64
oracle at the same tolerances.
"""

import functools
import math
import typing

import cases
import oracle
import torch

import m3_sparse

BF16, FP16, E4M3, E5M2 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = [(BF16, BF16), (FP16, FP16), (BF16, E4M3), (FP16, E4M3), (BF16, E5M2), (FP16, E5M2)]
SCORE_DTYPES = [(BF16, BF16), (FP16, FP16), (BF16, E4M3), (FP16, E4M3), (E4M3, E4M3)]
SCORE_PROBLEMS = [(128, 4), (64, 3), (128, 20)]  # page, topk


def names(dtypes):
    """The name of a pair of dtypes in a test's."""
    return "-".join(str(x)[6:] for x in dtypes)


class Problem(typing.NamedTuple):
    """Sparse attention: the case, its ids as they are handed over, and the options of the call."""

    case: cases.Case
    ids: torch.Tensor
    causal: bool = True
    scale: float | None = None

    def formulations(self):
        """Union tiles take 16 query heads a KV head."""
        heads = self.case.q.shape[1], self.case.k_cache.shape[1]
        return ("union", "kv_stationary") if heads[0] == 16 * heads[1] else ("kv_stationary",)


# page, heads, layout, causal, ids a row, scales, q_lens, kv_lens
RAGGED = {
    "ragged": (128, (16, 1), "hnd", True, 16, None, [9, 0, 1, 14], [9, 4, 129, 900]),
    "pages of 64": (64, (32, 2), "packed", True, 8, "head", [18, 3], [830, 64]),
    "full": (64, (16, 1), "nhd", False, 5, "scalar", [2, 11], [129, 530]),
    "overlapping": (128, (32, 2), "dense", True, 4, "head", [10], [300]),
    "wide": (128, (16, 1), "padded", True, 32, "scalar", [5, 2], [4500, 0]),
    "group of 8": (128, (16, 2), "packed", True, 4, "head", [30, 2], [500, 2]),
    "group of 3": (64, (6, 2), "padded", False, 16, "scalar", [7, 21], [70, 333]),
    "mha": (128, (3, 3), "nhd", True, 4, "head", [33], [300]),
    "group of 8, wide": (64, (8, 1), "hnd", True, 20, None, [6], [2900]),
    "more queries than keys": (128, (16, 1), "hnd", True, 2, None, [30], [9]),
}
OF_16 = [name for name, (_, heads, *_) in RAGGED.items() if heads[0] == 16 * heads[1]]  # which union tiles take


def ragged(name, q, kv):
    page, heads, layout, causal, topk, scales, q_lens, kv_lens = RAGGED[name]
    case = cases.make(
        q_lens, kv_lens, heads=heads, page=page, dtype=q, kv_dtype=kv, layout=layout, topk=topk, causal=causal,
        scales=scales if kv.itemsize == 1 else None, pad_rows=len(name) % 2 * 3, seed=len(name),
    )  # fmt: skip
    ids = [case.ids, cases.head_major(case.ids), cases.unaligned(case.ids)][len(name) % 3]
    return Problem(case, ids, causal)


def scaled(scale, heads, q, kv):
    case = cases.make([11], [300], heads=heads, dtype=q, kv_dtype=kv, topk=4)
    return Problem(case, case.ids, scale=scale)


def steep(scale, q, kv):
    """Logits that grow from block to block, so that rows move their references and O is rescaled."""
    case = cases.make([11], [900], heads=(16, 1), dtype=q, kv_dtype=kv, topk=6)
    return Problem(case, case.ids, scale=scale)


def contrast(scale, q, kv):
    """Logits far apart, where most exponentials vanish, or all equal; both kinds of exponentials, and their sum."""
    case = cases.make([24], [500], heads=(16, 1), dtype=q, kv_dtype=kv, topk=4, style="clean", seed=1)
    return Problem(case, case.ids, scale=scale)


def growing(q, kv):
    """Keys grow by the block: every block moves every row's reference."""
    case = cases.make([24], [1200], heads=(16, 1), dtype=q, kv_dtype=kv, topk=8, style="clean", seed=6)
    case.q.fill_(0.25)
    for i, page in enumerate(case.block_table[0, :10].tolist()):
        case.k_cache[page] = (torch.ones(case.k_cache[page].shape) * (0.5 + 0.75 * i)).to(kv)
    return Problem(case, case.ids, scale=1.0)


def large(q, kv):
    """Values up to near the end of fp16, of one sign a column, under flat logits: the sum of p v over a block, which
    KV-stationary kernels round to 16 bits, has room only if the p's are small."""
    problem = contrast(1e-3, q, kv)
    values = problem.case.v_cache
    signs = torch.where(torch.arange(128) % 3 == 0, -1.0, 1.0)
    values.copy_((values.float().abs().clamp(0.5, 1.0) * signs * min(4e4, torch.finfo(kv).max)).to(kv))
    return problem


def outside(page, heads, q, kv):
    """Page numbers outside the cache."""
    case = cases.make([14], [840], heads=heads, page=page, dtype=q, kv_dtype=kv, topk=8, style="clean", seed=page)
    bad = [1, 3, 6] if page == 128 else [0, 3, 6, 7, 12]  # 12: rows before 832 see nothing of the last block
    wrong = [-1, case.k_cache.shape[0], 1 << 30, -(2**31), -5][: len(bad)]
    case.block_table[0, bad] = torch.tensor(wrong, dtype=torch.int32)
    case.ids[-2:] = -1  # rows that see half a block, where a key of the other half would weigh much
    case.ids[-2, :, 0], case.ids[-1, :, 0] = 0, 1
    return Problem(case, case.ids)


def spread(case, first, second):
    """Tokens of even groups of 4 take the blocks `first`, those of odd groups `second`."""
    case.ids.fill_(-1)
    for row in range(case.ids.shape[0]):
        chosen = torch.tensor(second if row // 4 % 2 else first, dtype=torch.int32)
        case.ids[row, :, : len(chosen)] = chosen
    return case


# Blocks that half of a union tile has not chosen: as many as there are stages, more, and all of them.
HALVES = [([0, 12], list(range(1, 9))), (list(range(2, 10)), [0, 1, 11]), ([0, 2, 5], [])]


def halves(first, second, q, kv):
    case = spread(cases.make([19], [1560], heads=(16, 1), dtype=q, kv_dtype=kv), first, second)
    return Problem(case, case.ids)


def blemished(page, heads, q, kv):
    """A problem and the places (cache position, column) of its V and K that may become NaN or infinite: within the block
    of the queries, where only the later ones see it, and in blocks that some of a tile's tokens have chosen. The last
    tiles of both requests have some, and so has one with tiles behind it. Key 528's exponential SM100's KV-stationary
    kernel makes by a polynomial, as it does of 2 in 16, and the others' not."""
    case = cases.make([26, 7], [530, 250], heads=heads, page=page, dtype=q, kv_dtype=kv, topk=4, style="clean", seed=7)
    pick = torch.Generator().manual_seed(page)
    for row in range(33):
        blocks = [0, 1, 2, 3, 4] if row < 26 else [0, 1]
        keep = torch.rand(case.ids.shape[1], len(blocks), generator=pick) < 0.6
        for head in range(case.ids.shape[1]):
            chosen = [b for b, k in zip(blocks, keep[head]) if k][:4]
            case.ids[row, head] = torch.tensor(chosen + [-1] * (4 - len(chosen)), dtype=torch.int32)
    return Problem(case, case.ids), {0: [(140, 3), (507, 64), (515, 127), (528, 8)], 1: [(247, 77)]}


def spoil(case, cache, places, kinds):
    """NaN and infinities at the places, of every head; returns the cache as it was."""
    before = cache.clone()
    number = 0
    for b, at in places.items():
        for position, column in at:
            page, head = int(case.block_table[b, position // case.page]), number % cache.shape[1]
            cache[page, head, position % case.page, column] = torch.tensor(kinds[number % len(kinds)]).to(cache.dtype)
            number += 1
    return before


def kinds(kv):
    """What isn't finite in a dtype."""
    return [math.nan] if kv == E4M3 else [math.nan, math.inf, -math.inf]


def check_isolation(problem, places, *runs):
    """Each of `runs`: problem -> (out, lse). A NaN or infinity in V or K is in the results of the rows that see it, in V in
    its columns alone, and nothing else changes by a bit."""
    case, usual = problem.case, expected(problem)
    clean = [run(problem) for run in runs]
    for cache in (case.v_cache, case.k_cache):
        before = spoil(case, cache, places, kinds(cache.dtype))
        results, (want, want_lse) = [run(problem) for run in runs], expected(problem)
        cache.view(torch.uint8).copy_(before.view(torch.uint8))
        finite = want.isfinite()
        assert finite.any() and not finite.all()
        for (out, lse), (clean_out, clean_lse) in zip(results, clean):
            if cache is case.v_cache:
                oracle.check_bitwise(lse, clean_lse, "lse, of which V is no part")
                shown = torch.where(finite, 0.0, want)
                oracle.check_close(torch.where(finite, 0.0, out.double()), shown, 0, 0, "what isn't finite")
                oracle.check_bitwise(torch.where(finite, out, 0), torch.where(finite, clean_out, 0), "what is finite")
                continue
            seen = want.isnan().any(-1)
            assert out[seen].isnan().all() and not lse[seen].isfinite().any()
            moved = ~seen & ((want != usual[0]).any(-1) | (want_lse != usual[1]))  # a logit of -inf: weight 0
            oracle.check_attention(out[moved], lse[moved], want[moved], want_lse[moved])
            for got, old, what in ((out, clean_out, "out"), (lse, clean_lse, "lse")):
                oracle.check_bitwise(got[~(seen | moved)], old[~(seen | moved)], what)


bind = functools.partial
STEEP = {
    "steep": bind(steep, 40.0),
    "sharp": bind(contrast, 40.0),
    "clear": bind(contrast, 3.0),
    "flat": bind(contrast, 1e-3),
    "growing": growing,
    "large": large,
}
ATTENTION = {
    **{name: bind(ragged, name) for name in RAGGED},
    **{f"scale {scale}, group of {g}": bind(scaled, scale, (g, 1)) for scale in (-0.2, 0.0) for g in (16, 8)},
    **STEEP,
    **{f"outside, {p}, group of {g}": bind(outside, p, (g, 1)) for p in (64, 128) for g in (16, 8)},
    **{f"halves {i}": bind(halves, *pair) for i, pair in enumerate(HALVES)},
}


def attention(name, dtypes):
    return ATTENTION[name](*dtypes)


def attend(problem, formulation, place=lambda x: x):
    """(out, lse) of the public function for tensors that `place` has put on the device."""
    args, options = problem.case.sparse(problem.ids)
    args, options = [place(x) for x in args], {name: place(x) for name, x in options.items()}
    out = place(cases.nan_like(args[0].shape, args[0].dtype))
    lse = place(cases.nan_like(args[0].shape[:2], torch.float32))
    with m3_sparse.backend("aot"):
        m3_sparse.sparse_attention(
            *args, **options, causal=problem.causal, softmax_scale=problem.scale, out=out, lse=lse, return_lse=True,
            formulation=formulation,
        )  # fmt: skip
    return out.cpu(), lse.cpu()


def expected(problem):
    args, options = problem.case.sparse(problem.ids)
    return oracle.sparse_attention(*args, **options, causal=problem.causal, softmax_scale=problem.scale)


# page, heads, layout, causal, scales, q_lens, kv_lens: tiles of 64 rows, then of 128
DENSE = {
    "decode": (128, (32, 2), "hnd", True, None, [1, 3], [300, 17]),
    "verify": (64, (8, 2), "packed", True, "head", [4, 0, 2], [200, 64, 129]),
    "full": (64, (12, 1), "nhd", False, "scalar", [2, 1], [129, 0]),
    "prefill": (128, (16, 1), "nhd", True, None, [19], [530]),
    "chunked": (64, (10, 2), "padded", True, "scalar", [30, 7], [131, 400]),
    "overlapping": (128, (8, 2), "dense", False, "head", [40], [300]),
    "mha": (128, (2, 2), "hnd", True, None, [140], [140]),
    "more queries than keys": (128, (16, 1), "hnd", True, None, [30], [9]),
    "group of 5": (128, (5, 1), "hnd", True, None, [60], [160]),  # SM100: both stages of a tile end in empty rows
}


def dense(name, dtype):
    """(case, causal)"""
    page, heads, layout, causal, scales, q_lens, kv_lens = DENSE[name]
    case = cases.make(
        q_lens, kv_lens, heads=heads, page=page, dtype=dtype, layout=layout, scales=scales, pad_rows=len(q_lens) - 1,
        seed=len(name),
    )  # fmt: skip
    return case, causal


def apart(tokens, dtype, falling):
    """Dense attention: each block's logits are 9.5 powers of two above those of the block before it or behind it, and its
    values as much smaller. So rows move their references, whichever end the walk begins at, and all blocks count alike."""
    case = cases.make([tokens], [384], heads=(16, 1), dtype=dtype, style="clean", seed=tokens)
    case.q.fill_(0.25)
    step = 9.5 * math.log(2) / (32 * 128**-0.5)
    for i, page in enumerate(case.block_table[0, :3].tolist()):
        above = 2 - i if falling else i
        case.k_cache[page] = step * above
        case.v_cache[page] *= 2.0 ** (9.5 * (1 - above))
    return case


def scoring(page, dtypes):
    """Arguments of select_blocks and block_scores for prompts beside decode tokens."""
    return cases.make(
        [70, 5, 0, 33], [2900, 5, 130, 700], heads=(4, 4), dtype=dtypes[0], kv_dtype=dtypes[1], page=page, pad_rows=2,
        seed=page,
    ).index()  # fmt: skip
