"""What isn't read can't matter: NaN of every kind in what no row sees changes no bit of a result.

That is: unselected blocks, tokens past every length, unused pages, gaps between pages, columns of the table behind the last
page, padded rows, scales of heads that attend to nothing, states without weight. Results start as NaN, so that what isn't
written shows. Here for torch on the CPU; test_emulated_unread.py and gpu/test_unread_gpu.py run the same for the kernels.
"""

import cases
import oracle
import pytest
import torch
from contiguous import contiguous
from field_helpers import BF16, INF, Backend, is_empty, same, same_everywhere

import m3_sparse

NAN = float("nan")
FP16, E4M3, E5M2 = torch.float16, torch.float8_e4m3fn, torch.float8_e5m2
ATTENTION_DTYPES = [(BF16, BF16), (FP16, FP16), (BF16, E4M3), (FP16, E5M2)]
SELECTION_DTYPES = [(BF16, BF16), (FP16, FP16), (BF16, E4M3), (E4M3, E4M3)]
POISON = ("nan", "ones")  # the usual NaN; all bits one, which is a NaN in every format
Q_LENS, KV_LENS = [3, 9, 0, 6], [300, 150, 77, 385]


@pytest.fixture(scope="module")
def backend():
    return Backend("torch")


def name_of(dtypes):
    return "-".join(str(x)[6:] for x in dtypes)


def spoil_table(table, needed, generator):
    """Other garbage wherever an entry is never to be read."""
    wild = torch.tensor([-1, 0, 1, 2**31 - 1, -(2**31), 5], dtype=torch.int32)
    garbage = wild[torch.randint(0, 6, table.shape, generator=generator)]
    table.copy_(torch.where(needed, table, garbage))


def spoiled(poison, layout, dtypes, heads, seed, dense=False, **options):
    """A case whose unread bytes are `poison`; the same seed gives the same visible ones. `dense`: all blocks are read."""
    q, kv = dtypes
    page = 64 if seed % 2 else 128
    case = cases.make(
        Q_LENS, KV_LENS, heads=heads, page=page, dtype=q, kv_dtype=kv, layout=layout, pad_rows=3, poison=poison,
        seed=seed, **options,
    )  # fmt: skip
    for x in (case.q, case.index_q):
        x[-3:] = 0 if poison == "zero" else cases.filled(x[-3:].shape, x.dtype, poison)
    if poison == "zero":
        return case
    case.ids[-3:] = torch.tensor([3, -1, 2**31 - 1], dtype=torch.int32)[:, None, None]
    if layout != "dense" and not dense:
        cases.poison_unselected(case, cases.canonical(case, case.ids))
    generator = cases.generator(seed + 5)
    for table in (case.block_table, case.index_table):
        needed = torch.arange(table.shape[1]) < -(-torch.tensor(KV_LENS)[:, None] // page)
        spoil_table(table, needed, generator)
    return case


def forced(backend, case):
    """Each formulation once: what the shape would choose is one of them."""
    return [name for name in backend.formulations(case) if name] or [None]


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("dtypes", ATTENTION_DTYPES, ids=name_of)
@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
def test_attention(backend, dense, dtypes, layout):
    seed = cases.LAYOUTS.index(layout) + 5 * ATTENTION_DTYPES.index(dtypes)
    if dense and backend.name == "aot" and dtypes[0] != dtypes[1]:
        pytest.skip("no dense kernel for float8")
    call = (lambda x: {None: backend.dense(x)}) if dense else (lambda x: backend.every(x, forced(backend, x)))
    scales = "head" if dtypes[1] in cases.FP8 else None
    clean = call(spoiled("zero", layout, dtypes, (32, 2), seed, dense, scales=scales))
    for out, lse in clean.values():
        assert not out.isnan().any() and not lse.isnan().any(), "not written"
    case = spoiled(POISON[(seed + seed // 5) % 2], layout, dtypes, (32, 2), seed, dense, scales=scales)
    same_everywhere(clean, call(case))


@pytest.mark.parametrize("dtypes", [(BF16, BF16), (FP16, E5M2), (BF16, E4M3)], ids=name_of)
def test_scales_of_a_head_that_attends_to_nothing(backend, dtypes):
    """Its rows are empty, and empty rows are 0 and -inf whatever a scale is. The other heads' rows don't see it."""
    results = []
    for k_scale, v_scale in ((0.5, 2.0), (NAN, 2.0), (0.5, NAN), (INF, -INF)):
        case = spoiled("zero", "hnd", dtypes, (32, 2), 3)
        case.ids[:, 1] = -1
        case.k_scale, case.v_scale = torch.tensor([0.75, k_scale]), torch.tensor([3.0, v_scale])
        results.append(backend.every(case, forced(backend, case)))
        same_everywhere(results[0], results[-1])
        for out, lse in results[-1].values():
            assert is_empty(out[:, 16:], lse[:, 16:]) and out.isfinite().all()


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_scales_and_empty_rows_beside_others(backend, value, name):
    """More queries than keys: the first rows see nothing and are 0, though the scale spoils those that see something."""
    case = cases.make([9, 40], [4, 30], heads=(32, 2), dtype=BF16, pad_rows=2, poison="zero", seed=5)
    case.ids[:, :, 0] = 0
    setattr(case, name, torch.tensor([value, 1.0]))
    rows = torch.tensor([row for row, _, position in case.rows() if position < 0] + [49, 50])
    for out, lse in (*backend.every(case, forced(backend, case)).values(), backend.dense(case)):
        assert is_empty(out[rows], lse[rows])
        assert lse[:, 16:].isfinite().sum() == (4 + 30) * 16 and out[:, 16:].isfinite().all()


def test_scales_of_a_batch_without_tokens(backend):
    """Every row is empty."""
    for kv, scales in ((E4M3, "scalar"), (E4M3, "head"), (BF16, "head")):
        case = spoiled("zero", "hnd", (BF16, kv), (32, 2), 4, scales=scales)
        case.k_scale.fill_(NAN), case.v_scale.fill_(NAN)
        case.seqused_k.zero_()
        results = list(backend.every(case).values()) + ([backend.dense(case)] if kv == BF16 else [])
        assert all(is_empty(*found) for found in results)


@pytest.mark.parametrize("layout", ["hnd", "padded", "dense"])
@pytest.mark.parametrize("dtypes", SELECTION_DTYPES, ids=name_of)
def test_selection(backend, dtypes, layout):
    seed = cases.LAYOUTS.index(layout) + 5 * SELECTION_DTYPES.index(dtypes)
    results = []
    for poison in ("zero", POISON[(seed + seed // 5) % 2]):
        for long in (False, True):  # by the kernel of short and of long queries
            kv = dtypes[1]
            case = spoiled(poison, layout, (BF16 if dtypes[0] == E4M3 else dtypes[0], kv), (4, 4), seed, kind="int")
            if dtypes[0] == E4M3:
                case.index_q = case.index_q.to(E4M3)
            if long:  # so many rows a request that the other kernel takes them
                case.index_q = case.index_q[torch.arange(len(case.index_q)).repeat_interleave(8)]
                case.cu_seqlens_q = case.cu_seqlens_q * 8
            ids, scores = backend.select(case)
            assert not scores.isnan().any() and (ids >= -1).all()
            results.append((ids, scores))
    for n, found in enumerate(results[2:]):
        same(results[n % 2], found, "selection")


@pytest.mark.parametrize("layout", ["HND", "NHD", "packed"])
def test_contiguous_caches(backend, layout):
    """Slots before the padding's end and behind a length."""
    case = cases.make(Q_LENS, KV_LENS, heads=(32, 2), dtype=BF16, seed=9)
    k, v, index_k, leftpad = contiguous(case, 70, [5, 0, 64, 1], layout)
    results = []
    for clean in (False, True):
        if clean:
            for x in (k, v, index_k):
                x.masked_fill_(x.isnan(), 0)
        on = lambda x: x.to(backend.device)
        lengths = {"cu_seqlens_q": on(case.cu_seqlens_q), "seqused_k": on(case.seqused_k), "leftpad_k": on(leftpad)}
        with m3_sparse.backend(backend.name):
            found = [m3_sparse.select_blocks(on(case.index_q), on(index_k), None, **lengths, return_scores=True)]
            found.append(m3_sparse.dense_attention(on(case.q), on(k), on(v), None, **lengths, return_lse=True))
            for name in backend.formulations(case):
                options = {"return_lse": True, "formulation": name}
                found.append(
                    m3_sparse.sparse_attention(on(case.q), on(k), on(v), on(case.ids), None, **lengths, **options)
                )
        results.append([x.cpu() for pair in found for x in pair])
    assert not any(x.isnan().any() for x in results[0])
    same(*results, "contiguous")


@pytest.mark.parametrize("dtype", [torch.float32, BF16, FP16])
def test_merged_states_without_weight(backend, dtype):
    generator = cases.generator(1)
    outs = torch.randn(6, 9, 5, 128, generator=generator).to(dtype)
    lses = torch.randn(6, 9, 5, generator=generator)
    dead = torch.rand(lses.shape, generator=generator) < 0.5
    dead[:, 4, 2] = True
    lses[dead] = float("-inf")
    results = []
    for poison in ("zero", "inf", *POISON):
        outs[dead] = cases.filled(outs[dead].shape, dtype, poison)
        with m3_sparse.backend(backend.name):
            results.append([x.cpu() for x in m3_sparse.merge_states(outs.to(backend.device), lses.to(backend.device))])
        same(results[0], results[-1], poison)
    oracle.check_attention(*results[0], *oracle.merge_states(outs, lses))


@pytest.mark.parametrize("kept", [BF16, E4M3], ids=["bf16", "e4m3"])
def test_rows_that_are_not_stored(backend, kept):
    """Neither they nor what the caches held before matter."""
    generator = cases.generator(2)
    k, v = (torch.randn(20, 2, 128, generator=generator).to(BF16) for _ in range(2))
    index_k = torch.randn(20, 128, generator=generator).to(BF16)
    slots = torch.randperm(3 * 64, generator=generator)[:20]
    slots[::3] = torch.tensor([-1, 3 * 64, 2**31, -(2**31), -1, 2**63 - 1, 2**40])
    results = []
    for poison in ("zero", *POISON):
        caches = [cases.filled(shape, kept, poison) for shape in [(3, 2, 64, 128)] * 2 + [(3, 64, 128)]]
        for x in (k, v, index_k):
            x[::3] = cases.filled(x[::3].shape, BF16, poison)
        on = lambda x: x.to(backend.device)
        caches = [on(x) for x in caches]
        with m3_sparse.backend(backend.name):
            m3_sparse.store_kv(on(k), on(v), on(index_k), *caches, on(slots))
        results.append([x.cpu() for x in caches])
    good = slots[(slots >= 0) & (slots < 3 * 64)]
    pick = lambda c: (c[good // 64, :, good % 64] if c.dim() == 4 else c[good // 64, good % 64]).view(torch.uint8)
    for found in results[1:]:
        for a, b in zip(results[0], found):
            assert torch.equal(pick(a), pick(b))
