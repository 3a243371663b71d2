"""What property tests and attacks found in the AOT kernels' way, each by name, in the PTX emulator. Needs `--backend=emulated`."""

import cases
import field_helpers
import oracle
import pytest
import test_property_cases as found
import torch

import m3_sparse

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
SCALES = {
    "strided": torch.tensor([0.5, 9.0, 2.0, 9.0])[::2],
    "expanded": torch.tensor([0.5]).expand(2),
    "one in two dimensions": torch.tensor([[0.5]]),
}


@pytest.mark.parametrize("form", SCALES)
def test_scales_of_any_strides(emulation, form):
    """k_scale and v_scale that aren't contiguous were refused by the operator, after the arguments had passed."""
    backend, scale = field_helpers.Backend("aot"), SCALES[form]
    case = field_helpers.make([2, 9], [300, 140], heads=(32, 2), kv_dtype=E4M3, seed=1)
    case.k_scale = case.v_scale = scale
    backend.check(case)
    case = field_helpers.make([2, 9], [300, 140], heads=(32, 2), seed=1)
    case.k_scale = case.v_scale = scale
    backend.check_dense(case)
    k, v = (torch.randn(3, 2, 128).to(BF16) for _ in range(2))
    caches = [torch.zeros(2, 2, 64, 128).to(E4M3) for _ in range(2)]
    arguments = (k, v, None, *caches, None, torch.tensor([5, 70, 1]))
    want = oracle.store_kv(*arguments, k_scale=scale, v_scale=scale)
    with m3_sparse.backend("aot"):
        m3_sparse.store_kv(*arguments, k_scale=scale, v_scale=scale)
    for cache, expected in zip(caches, want):
        assert torch.equal(oracle.stored_bytes(cache), expected)


@pytest.mark.parametrize("name", ["block_scores", "select_blocks"])
def test_float8_queries_over_expanded_keys_take_torch(emulation, name):
    """The call failed in the operator; by default it takes the torch backend."""
    case = cases.make([2], [300], heads=(4, 4), dtype=BF16, kv_dtype=E4M3, kind="int", poison="zero")
    case.index_q = case.index_q.to(E4M3)
    case.index_k_cache = case.index_k_cache[:1].expand(case.index_k_cache.shape)
    args, lengths = case.index()
    with m3_sparse.backend("aot"), pytest.raises(NotImplementedError, match="strides above 0"):
        getattr(m3_sparse, name)(*args, **lengths)
    scores = m3_sparse.block_scores(*args, **lengths)
    assert torch.equal(scores.double(), oracle.block_scores(*args, **lengths))


@pytest.mark.parametrize("formulation", [None, "decode", "union", "kv_stationary"])
@pytest.mark.parametrize("table", [True, False], ids=["pages", "contiguous"])
def test_a_cache_without_a_token_gives_empty_rows(emulation, table, formulation):
    """kv_stationary, asked for by name, refused a cache without a page, or of rows without a slot."""
    q = torch.randn(2, 16, 128).to(BF16)
    cache = torch.zeros((0, 1, 128, 128) if table else (2, 1, 0, 128), dtype=BF16)
    pages = torch.zeros(2, 3, dtype=torch.int32) if table else None
    lengths = {"cu_seqlens_q": torch.tensor([0, 1, 2]), "seqused_k": torch.tensor([300, 0])}
    out, lse = torch.full_like(q, float("nan")), torch.full((2, 16), float("nan"))
    with m3_sparse.backend("aot"):
        m3_sparse.sparse_attention(
            q, cache, cache, torch.zeros(2, 1, 16, dtype=torch.int32), pages, **lengths, out=out, lse=lse,
            formulation=formulation,
        )  # fmt: skip
    assert field_helpers.is_empty(out, lse)


def test_selection_over_any_number_of_requests(emulation):
    """65,535 requests are more than a grid of the kernels holds: the operator refused them after the arguments had passed."""
    requests = 65535
    index_q, keys = torch.randn(3, 1, 128).to(BF16), torch.randn(2, 64, 128).to(BF16)
    table = torch.zeros(requests, 1, dtype=torch.int32)
    table[-1] = 1
    starts = torch.ones(requests + 1, dtype=torch.int32)
    starts[0], starts[-1] = 0, 3
    lengths = {"cu_seqlens_q": starts, "seqused_k": torch.full((requests,), 50, dtype=torch.int32)}
    want = torch.stack([(index_q[i].float() @ keys[p, :end].float().T).amax() for i, p, end in
                        ((0, 0, 50), (1, 1, 49), (2, 1, 50))])  # fmt: skip
    torch.testing.assert_close(m3_sparse.block_scores(index_q, keys, table, **lengths).flatten(), want)
    assert m3_sparse.select_blocks(index_q, keys, table, topk=2, **lengths).tolist() == [[[0, -1]]] * 3
    with m3_sparse.backend("aot"), pytest.raises(NotImplementedError, match="at most 65534 requests, got 65535"):
        m3_sparse.block_scores(index_q, keys, table, **lengths)


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=["bf16", "fp16"])
def test_logits_of_the_size_promised(emulation, dtype, arch):
    """Up to 10^8: what rounding leaves between a large logit and the row's largest is no overflow of its weight yet."""
    case = cases.make([1, 3, 9], [130, 17, 400], heads=(32, 2), dtype=dtype, style="clean", poison="zero", seed=1)
    args, options = case.sparse()
    _, lse = oracle.sparse_attention(*args, **options, softmax_scale=1.0)
    scale = 1e8 / lse[lse.isfinite()].amax().item()
    want = oracle.sparse_attention(*args, **options, softmax_scale=scale)
    with emulation.device(arch), m3_sparse.backend("aot"):
        for formulation in ("decode", "union", "kv_stationary"):
            out, lse = cases.call_sparse(
                m3_sparse.sparse_attention, case, formulation=formulation, softmax_scale=scale
            )  # fmt: skip
            oracle.check_attention(out, None, want[0], None)
            oracle.check_close(lse, want[1], 0, 2e-6, "lse")
        out, lse = cases.call_dense(m3_sparse.dense_attention, case, softmax_scale=scale)
    want = oracle.dense_attention(*case.dense()[0], **options, softmax_scale=scale)
    oracle.check_attention(out, None, want[0], None)
    oracle.check_close(lse, want[1], 0, 2e-6, "lse")


@pytest.mark.parametrize("architecture", ["sm_90", "sm_100"])
@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
@pytest.mark.parametrize("dtypes", found.ATTENTION_DTYPES, ids=str)
def test_what_is_not_finite_stays_visible(emulation, dtypes, dense, architecture):
    if dense and dtypes[0] != dtypes[1]:
        pytest.skip("no dense kernel for float8")
    values = (found.NAN, -found.INF) if dtypes == (BF16, BF16) else (found.NAN,)
    with emulation.device(architecture):
        found.check_what_is_not_finite(field_helpers.Backend("aot"), dtypes, dense, values)


@pytest.mark.parametrize("architecture", ["sm_90", "sm_100"])
def test_an_infinite_scale_over_products_of_one_sign(emulation, architecture):
    case = field_helpers.make([1], [300], poison="zero")
    case.q.fill_(-1), case.k_cache.fill_(1)
    case.k_scale = torch.tensor([float("inf")])
    backend = field_helpers.Backend("aot")
    with emulation.device(architecture):
        for out, lse in (*backend.every(case).values(), backend.dense(case)):
            assert out.isnan().all() and lse.isnan().all()


@pytest.mark.parametrize("architecture", ["sm_90", "sm_100", "sm_103"])
def test_a_key_that_is_not_finite_in_any_column(emulation, architecture):
    """SM100's dense kernel took NaN for -127 where a polynomial makes the exponential: 16 columns of a block of 128."""
    columns = range(0, 128, 5), range(43, 49), range(60, 65)
    case = field_helpers.make([1, 1], [256, 200], poison="zero")
    backend = field_helpers.Backend("aot")
    with emulation.device(architecture):
        clean, clean_lse = backend.dense(case)
        for column in sorted({c for chosen in columns for c in chosen}):
            page = int(case.block_table[0, column // case.k_cache.shape[2]])
            place = case.k_cache[page, :, column % case.k_cache.shape[2]]
            before = place.clone()
            place[:, 0] = float("nan")
            out, lse = backend.dense(case)
            place.copy_(before)
            assert out[0].isnan().all() and lse[0].isnan().all(), column
            assert torch.equal(out[1], clean[1]) and torch.equal(lse[1], clean_lse[1]), column
