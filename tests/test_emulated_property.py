"""The draws of test_property.py on the AOT kernels, in the PTX emulator. Needs `--backend=emulated`.

The architecture is drawn too, and whether asynchronous operations complete at once or as late as they may.
"""

import contextlib

import hypothesis
import property_checks as checks
import property_draws as draws
from hypothesis import strategies as st
from property_settings import examples

HOW = st.tuples(st.sampled_from(["sm_90", "sm_90", "sm_100", "sm_103"]), st.sampled_from(["eager", "late"]))


@contextlib.contextmanager
def emulating(emulation, how):
    architecture, policy = how
    with emulation.device(architecture), emulation.policy(policy):
        yield checks.Device("aot", "emulated", architecture=architecture)


@examples("sparse_attention", "emulated")
@hypothesis.given(call=draws.calls(draws.attention, draws.AOT), how=HOW)
def test_sparse_attention(emulation, call, how):
    with emulating(emulation, how) as device:
        checks.attention(device, call)


@examples("dense_attention", "emulated")
@hypothesis.given(call=draws.calls(draws.attention, draws.AOT, True), how=HOW)
def test_dense_attention(emulation, call, how):
    with emulating(emulation, how) as device:
        checks.attention(device, call, dense=True)


@examples("block_scores", "emulated")
@hypothesis.given(call=draws.calls(draws.scoring, draws.AOT, "block_scores"), how=HOW)
def test_block_scores(emulation, call, how):
    with emulating(emulation, how) as device:
        checks.scores(device, call)


@examples("select_blocks", "emulated")
@hypothesis.given(call=draws.calls(draws.scoring, draws.AOT, "select_blocks"), how=HOW)
def test_select_blocks(emulation, call, how):
    with emulating(emulation, how) as device:
        checks.selection(device, call)


@examples("store_kv", "emulated")
@hypothesis.given(call=draws.calls(draws.store, draws.AOT), how=HOW)
def test_store_kv(emulation, call, how):
    with emulating(emulation, how) as device:
        checks.store(device, call)


@examples("merge_states", "emulated")
@hypothesis.given(call=draws.calls(draws.merge, draws.AOT), how=HOW)
def test_merge_states(emulation, call, how):
    with emulating(emulation, how) as device:
        checks.merge(device, call)
