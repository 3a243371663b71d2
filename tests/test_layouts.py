"""One problem in every memory layout: the same selection and attention, and never a byte of the poison around it."""

import cases
import oracle
import pytest
import torch

import m3_sparse

LENGTHS = {"q_lens": [3, 0, 5, 2, 9], "kv_lens": [1290, 33, 2500, 1, 129]}


def run(case, **options):
    out, lse = cases.call_sparse(m3_sparse.sparse_attention, case, **options)
    dense, dense_lse = cases.call_dense(m3_sparse.dense_attention, case)
    args, kwargs = case.index()
    return out, lse, dense, dense_lse, m3_sparse.select_blocks(*args, **kwargs)


def check(case, got):
    out, lse, dense, dense_lse, ids = got
    args, kwargs = case.sparse()
    oracle.check_attention(out, lse, *oracle.sparse_attention(*args, **kwargs))
    args, kwargs = case.dense()
    oracle.check_attention(dense, dense_lse, *oracle.dense_attention(*args, **kwargs))
    args, kwargs = case.index()
    counts = oracle.candidates(case.cu_seqlens_q, case.seqused_k, case.index_table, case.page, case.q.shape[0])
    oracle.check_bitwise(ids, oracle.select(oracle.block_scores(*args, **kwargs), counts), "block_indices")


def check_same(got, reference):
    oracle.check_attention(got[0], got[1], reference[0].double(), reference[1].double())
    oracle.check_attention(got[2], got[3], reference[2].double(), reference[3].double())
    oracle.check_bitwise(got[4], reference[4], "block_indices")


def aligned(case, ids):
    case.ids = ids
    return case


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("page", [64, 128])
@pytest.mark.parametrize(
    "dtype, kv_dtype",
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float8_e4m3fn),
        (torch.bfloat16, torch.float8_e5m2),
    ],
)
def test_cache_layouts(layout, page, dtype, kv_dtype):
    options = {
        **LENGTHS,
        "dtype": dtype,
        "kv_dtype": kv_dtype,
        "kind": "int",
        "scales": "head" if kv_dtype in cases.FP8 else None,
    }
    plain = cases.make(**options, seed=1)
    case = cases.make(**options, seed=1, page=page, layout=layout)
    case.ids, case.k_scale, case.v_scale = plain.ids, plain.k_scale, plain.v_scale
    got = run(case)
    check(case, got)
    check_same(got, run(plain))


@pytest.mark.parametrize("index_layout", ["hnd", "padded", "dense"])
@pytest.mark.parametrize("layout", ["hnd", "packed"])
def test_index_cache_has_its_own_layout_and_table(layout, index_layout):
    case = cases.make(**LENGTHS, kind="int", layout=layout, index_layout=index_layout, seed=2)
    assert not torch.equal(case.index_table[:, :1], case.block_table[:, :1])
    check(case, run(case))


def test_kv_and_index_may_differ_in_page_size():
    kv = cases.make(**LENGTHS, kind="int", page=128, seed=3)
    index = cases.make(**LENGTHS, kind="int", page=64, seed=3)
    args, kwargs = index.index()
    ids = m3_sparse.select_blocks(*args, **kwargs)
    args, kwargs = kv.index()
    oracle.check_bitwise(ids, m3_sparse.select_blocks(*args, **kwargs), "block_indices")


@pytest.mark.parametrize("k_layout, v_layout", [("hnd", "nhd"), ("packed", "padded"), ("nhd", "packed")])
def test_k_and_v_of_different_strides(k_layout, v_layout):
    k_case = cases.make(**LENGTHS, kind="int", layout=k_layout, seed=4)
    v_case = cases.make(**LENGTHS, kind="int", layout=v_layout, seed=4)
    k_case.v_cache = v_case.v_cache
    assert torch.equal(k_case.block_table, v_case.block_table) and k_case.k_cache.stride() != k_case.v_cache.stride()
    check(k_case, run(k_case))


@pytest.mark.parametrize("view", ["head_major", "unaligned", "reversed_heads", "long_buffer", "expanded"])
def test_selection_views(view):
    case = cases.make(**LENGTHS, heads=(8, 4), kind="int", seed=5)
    if view == "expanded":  # one selection for all heads, stride 0
        case.ids = case.ids[:, :1].contiguous()
        plain = case.ids.expand(-1, 4, -1).contiguous()
        strided = case.ids.expand(-1, 4, -1)
    elif view == "reversed_heads":  # a slot-major buffer: no dimension has the stride that its size suggests
        plain = case.ids
        strided = plain.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    elif view == "long_buffer":  # the slice [:, :T] of a persistent [Hkv, max_tokens, K] buffer
        plain = case.ids
        buffer = torch.zeros(4, 64, 16, dtype=torch.int32)
        buffer[:, : plain.shape[0]] = plain.transpose(0, 1)
        strided = buffer[:, : plain.shape[0]].transpose(0, 1)
    else:
        plain = case.ids
        strided = getattr(cases, view)(plain)
    assert not strided.is_contiguous() and torch.equal(strided, plain)
    want = run(aligned(case, plain))
    check(case, want)
    got = run(aligned(case, strided))
    oracle.check_bitwise(got[0], want[0], "out")
    oracle.check_bitwise(got[1], want[1], "lse")


def test_heads_equal_to_tokens_is_not_taken_for_another_order():
    """T == Hkv == K: only strides tell token-major from head-major."""
    case = cases.make([4], [2500], heads=(8, 4), topk=4, kind="int", seed=6)
    check(case, run(case))
    check(case, run(aligned(case, cases.head_major(case.ids))))


@pytest.mark.parametrize("shared", [True, False])
def test_pages_shared_by_requests(shared):
    case = cases.make([3, 3, 2], [700, 700, 300], kind="int", seed=7)
    if shared:
        case.block_table[1] = case.block_table[0]
        case.block_table[2, :3] = case.block_table[0, [4, 0, 0]]
        case.index_table[1] = case.index_table[0]
        case.index_table[2, :3] = case.index_table[0, [4, 0, 0]]
    check(case, run(case))


def test_page_id_beyond_32768():
    """Pages that overlap in memory by all but one token make high page numbers cheap."""
    case = cases.make([2, 1], [300, 140], heads=(4, 2), kind="int", seed=8)
    gen = cases.generator(9)
    rows = 40000
    keys, vals = (cases.values((2, rows, 128), "int", torch.float32, gen) for _ in range(2))
    shape, strides = (rows - 127, 2, 128, 128), (128, rows * 128, 128, 1)
    case.k_cache, case.v_cache = keys.as_strided(shape, strides), vals.as_strided(shape, strides)
    case.index_k_cache = keys[0].as_strided((rows - 127, 128, 128), (128, 128, 1))
    case.block_table[0, :3] = torch.tensor([39872, 32768, 39001])
    case.block_table[1, :2] = torch.tensor([33000, 39872])
    case.index_table = case.block_table
    check(case, run(case))


@pytest.mark.parametrize("page", [64, 128])
def test_table_of_one_column_and_of_many(page):
    case = cases.make([2, 1], [page, 5], page=page, kind="int", seed=10)
    wide = run(case)
    check(case, wide)
    case.block_table, case.index_table = case.block_table[:, :1], case.index_table[:, :1]
    check(case, run(case))
    table = torch.full((2, 5000), -1, dtype=torch.int32)
    table[:, :1] = case.block_table
    case.block_table = table
    check(case, run(case))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strided_queries_and_outputs(dtype):
    case = cases.make(**LENGTHS, dtype=dtype, kind="int", pad_rows=2, seed=11)
    want = run(case)
    total, heads = case.q.shape[:2]
    fused = torch.full((total, heads + 4, 128), float("nan"), dtype=dtype)
    fused[:, :heads] = case.q
    for q in (fused[:, :heads], case.q.transpose(0, 1).contiguous().transpose(0, 1)):
        case.q = q
        assert not q.is_contiguous()
        out = cases.nan_like((heads, total, 128), dtype).transpose(0, 1)
        lse = cases.nan_like((heads, total), torch.float32).T
        got = run(case, out=out, lse=lse)
        oracle.check_bitwise(got[0], want[0], "out")
        oracle.check_bitwise(got[1], want[1], "lse")
    packed = torch.full((total, 3, 128), float("nan"), dtype=dtype)
    packed[:, :2] = case.index_q
    case.index_q = packed[:, :2]
    oracle.check_bitwise(run(case)[4], want[4], "block_indices")


def test_output_slice_of_a_larger_buffer_leaves_the_rest_alone():
    case = cases.make(**LENGTHS, kind="int", seed=12)
    want = run(case)
    total, heads = case.q.shape[:2]
    buffer = torch.full((total + 2, heads + 3, 128), 7.5)
    logs = torch.full((total + 2, heads + 3), 7.5)
    got = run(case, out=buffer[1:-1, 2:-1], lse=logs[1:-1, 2:-1])
    oracle.check_bitwise(got[0], want[0], "out")
    oracle.check_bitwise(got[1], want[1], "lse")
    assert (buffer != 7.5).any(-1).sum() == total * heads and (logs != 7.5).sum() == total * heads


def test_inputs_are_not_written():
    case = cases.make(**LENGTHS, kind="int", seed=13)
    names = (
        "q",
        "k_cache",
        "v_cache",
        "block_table",
        "index_q",
        "index_k_cache",
        "index_table",
        "cu_seqlens_q",
        "seqused_k",
        "ids",
    )
    before = {n: getattr(case, n).clone() for n in names}
    run(case)
    for name in names:
        oracle.check_bitwise(getattr(case, name), before[name], name)
