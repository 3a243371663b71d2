"""The draws of test_property.py on a GPU: the AOT kernels where there are any for it, and torch."""

import field_helpers
import hypothesis
import property_checks as checks
import property_draws as draws
import pytest
import test_property_cases as cases
import torch
from property_settings import examples

CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
AOT = checks.Device("aot", "aot on a GPU", "cuda", "sm_{}{}".format(*CAPABILITY))
TORCH = checks.Device("torch", "torch on a GPU", "cuda")
COMPILED = CAPABILITY in ((9, 0), (10, 0), (10, 3))

pytestmark = pytest.mark.skipif(not COMPILED, reason="the kernels are compiled for SM90, SM100 and SM103")


@examples("sparse_attention", AOT.label)
@hypothesis.given(call=draws.calls(draws.attention, draws.AOT))
def test_sparse_attention(call):
    checks.attention(AOT, call)


@examples("dense_attention", AOT.label)
@hypothesis.given(call=draws.calls(draws.attention, draws.AOT, True))
def test_dense_attention(call):
    checks.attention(AOT, call, dense=True)


@examples("block_scores", AOT.label)
@hypothesis.given(call=draws.calls(draws.scoring, draws.AOT, "block_scores"))
def test_block_scores(call):
    checks.scores(AOT, call)


@examples("select_blocks", AOT.label)
@hypothesis.given(call=draws.calls(draws.scoring, draws.AOT, "select_blocks"))
def test_select_blocks(call):
    checks.selection(AOT, call)


@examples("store_kv", AOT.label)
@hypothesis.given(call=draws.calls(draws.store, draws.AOT))
def test_store_kv(call):
    checks.store(AOT, call)


@examples("merge_states", AOT.label)
@hypothesis.given(call=draws.calls(draws.merge, draws.AOT))
def test_merge_states(call):
    checks.merge(AOT, call)


@examples("sparse_attention", TORCH.label)
@hypothesis.given(call=draws.calls(draws.attention, draws.TORCH))
def test_torch_sparse_attention(call):
    checks.attention(TORCH, call)


@examples("dense_attention", TORCH.label)
@hypothesis.given(call=draws.calls(draws.attention, draws.TORCH, True))
def test_torch_dense_attention(call):
    checks.attention(TORCH, call, dense=True)


@examples("select_blocks", TORCH.label)
@hypothesis.given(call=draws.calls(draws.scoring, draws.TORCH, "select_blocks"))
def test_torch_select_blocks(call):
    checks.selection(TORCH, call)


@examples("store_kv", TORCH.label)
@hypothesis.given(call=draws.calls(draws.store, draws.TORCH))
def test_torch_store_kv(call):
    checks.store(TORCH, call)


@examples("merge_states", TORCH.label)
@hypothesis.given(call=draws.calls(draws.merge, draws.TORCH))
def test_torch_merge_states(call):
    checks.merge(TORCH, call)


@pytest.mark.parametrize("name", ["aot", "torch"])
@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
@pytest.mark.parametrize("dtypes", cases.ATTENTION_DTYPES, ids=str)
def test_what_is_not_finite_stays_visible(dtypes, dense, name):
    if dense and name == "aot" and dtypes[0] != dtypes[1]:
        pytest.skip("no dense kernel for float8")
    cases.check_what_is_not_finite(
        field_helpers.Backend(name, "cuda"), dtypes, dense, (cases.NAN, cases.INF, -cases.INF)
    )
