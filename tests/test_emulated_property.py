"""The draws of test_property.py on the AOT kernels, in the PTX emulator. Needs `--backend=emulated`.

Every operation of an odd example completes as late as it may, of an even one at once.
"""

import hypothesis
import property_checks as checks
import property_draws as draws
from hypothesis import strategies as st
from property_settings import examples

AOT = checks.Device("aot", "emulated")
POLICIES = st.sampled_from(["eager", "late"])


@examples("sparse_attention", "emulated")
@hypothesis.given(call=draws.calls(draws.attention, draws.AOT), policy=POLICIES)
def test_sparse_attention(emulation, call, policy):
    with emulation.policy(policy):
        checks.attention(AOT, call)


@examples("dense_attention", "emulated")
@hypothesis.given(call=draws.calls(draws.attention, draws.AOT, True), policy=POLICIES)
def test_dense_attention(emulation, call, policy):
    with emulation.policy(policy):
        checks.attention(AOT, call, dense=True)


@examples("block_scores", "emulated")
@hypothesis.given(call=draws.calls(draws.scoring, draws.AOT, "block_scores"), policy=POLICIES)
def test_block_scores(emulation, call, policy):
    with emulation.policy(policy):
        checks.scores(AOT, call)


@examples("select_blocks", "emulated")
@hypothesis.given(call=draws.calls(draws.scoring, draws.AOT, "select_blocks"), policy=POLICIES)
def test_select_blocks(emulation, call, policy):
    with emulation.policy(policy):
        checks.selection(AOT, call)


@examples("store_kv", "emulated")
@hypothesis.given(call=draws.calls(draws.store, draws.AOT), policy=POLICIES)
def test_store_kv(emulation, call, policy):
    with emulation.policy(policy):
        checks.store(AOT, call)


@examples("merge_states", "emulated")
@hypothesis.given(call=draws.calls(draws.merge, draws.AOT), policy=POLICIES)
def test_merge_states(emulation, call, policy):
    with emulation.policy(policy):
        checks.merge(AOT, call)
