"""Random calls of every public operation on the torch backend, judged by an error bound (property_bounds.py).

`make property` runs more of them. What a draw may be: property_draws.py. The same draws run for the AOT kernels in the
PTX emulator (test_emulated_property.py) and on a GPU (gpu/test_property_gpu.py).
"""

import hypothesis
import property_checks as checks
import property_draws as draws
from property_settings import examples

TORCH = checks.Device("torch", "torch")


@examples("sparse_attention", "torch")
@hypothesis.given(call=draws.calls(draws.attention, draws.TORCH))
def test_sparse_attention(call):
    checks.attention(TORCH, call)


@examples("dense_attention", "torch")
@hypothesis.given(call=draws.calls(draws.attention, draws.TORCH, True))
def test_dense_attention(call):
    checks.attention(TORCH, call, dense=True)


@examples("block_scores", "torch")
@hypothesis.given(call=draws.calls(draws.scoring, draws.TORCH, "block_scores"))
def test_block_scores(call):
    checks.scores(TORCH, call)


@examples("select_blocks", "torch")
@hypothesis.given(call=draws.calls(draws.scoring, draws.TORCH, "select_blocks"))
def test_select_blocks(call):
    checks.selection(TORCH, call)


@examples("store_kv", "torch")
@hypothesis.given(call=draws.calls(draws.store, draws.TORCH))
def test_store_kv(call):
    checks.store(TORCH, call)


@examples("merge_states", "torch")
@hypothesis.given(call=draws.calls(draws.merge, draws.TORCH))
def test_merge_states(call):
    checks.merge(TORCH, call)
