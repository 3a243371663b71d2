"""The launches of sparse_attention's prefill formulations without a GPU: which one a call takes and what union tiles pack.

What the kernels compute is tested in tests/gpu/test_prefill_union_gpu.py.
"""

import functools

import pytest
from launch_checks import LaunchChecks, attention_problem, error_of, needs_variant, operators
from test_union import layout

check = LaunchChecks(__file__)
UNION, KV_STATIONARY, DECODE, BY_SEQUENCE, WIDENED = 1, 2, 3, 4, 5
SHORT = {"bfloat16": "bf16", "float16": "f16", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}

problem = functools.partial(attention_problem, tokens=2000, width=40)


def plan(arguments, formulation=0):
    query, k_cache, v_cache, ids, table, cu, used = arguments[2:9]
    made = operators().aot_attention_plan(query, k_cache, v_cache, ids, table, cu, used, arguments[10], formulation)
    return made[0].item()


@check
def packs_every_parameter(driver):
    import torch

    attend = operators().aot_sparse_attention
    pairs = [(q, kv) for q in ("bfloat16", "float16") for kv in (q, "float8_e4m3fn", "float8_e5m2")]
    for (q, kv), page in [(pair, page) for pair in pairs for page in (64, 128)]:
        qt, kt = getattr(torch, q), getattr(torch, kv)
        size = kt.itemsize
        query = torch.zeros(20, 34, 160, dtype=qt)[:, 1:33, 16:144]
        out = torch.zeros(32, 20, 128, dtype=qt).transpose(0, 1)
        packed = torch.zeros(5, 2, page, 256, dtype=torch.float32).to(kt)
        k_cache, v_cache = packed[..., :128], packed.transpose(1, 2).contiguous().transpose(1, 2)[..., 128:]
        ids = torch.zeros(20, 2, 16, dtype=torch.int32)
        table = torch.zeros(3, 4, dtype=torch.int32)
        cu, used = torch.zeros(4, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
        lse = torch.zeros(20, 40)[:, :32]
        k_scale, v_scale = torch.ones(2), torch.ones(1)
        tensors = (out, lse, query, k_cache, v_cache, ids, table, cu, used)
        attend(*tensors, 0.25, page == 64, k_scale, v_scale, 0, True, UNION)
        build, forward = driver.launches
        driver.launches.clear()
        slots, capacity, at = layout(20, 3, 2, page, 4, 16)
        threads = 384 if size == 2 else 512
        assert build.entry == "m3s_union_lists_sm90a_0"
        assert forward.entry == f"m3s_prefill_union_{SHORT[kv]}_sm90a_0"
        assert forward.grid == (slots * 2, 1, 1) and forward.block == (threads, 1, 1) and driver.last_overlap == 1
        assert forward.shared_bytes == driver.manifests[forward.entry]["dynamic_smem"] <= 232448
        q_map, k_map, v_map = forward.params[:3]
        assert q_map.base == query.data_ptr() and list(q_map.extents) == [128, 32, 20]
        assert list(q_map.strides) == [s * 2 for s in (query.stride(1), query.stride(0))]
        assert list(q_map.box) == [64, 16, 8]
        for found, cache in ((k_map, k_cache), (v_map, v_cache)):
            assert found.base == cache.data_ptr() and list(found.extents) == [128, page, 2, 5]
            assert list(found.strides) == [cache.stride(i) * size for i in (2, 1, 0)]
            assert list(found.box) == [128 if size == 1 else 64, page, 1, 1]
        base = build.params[4]
        want = [base + x for x in at[:4]] + [0] + [x.data_ptr() for x in (out, lse, k_scale, v_scale)]
        want += [s * 2 for s in out.stride()[:2]] + [s * 4 for s in lse.stride()] + [4, 0]
        want += [slots, 2, 3, 7 if page == 128 else 6, capacity, int(page == 64), int(q == "bfloat16"), 0.25]
        assert forward.params[3:] == want


@check
def a_widened_cache_is_packed_by_entry(driver):
    import torch

    attend = operators().aot_sparse_attention
    for kv, page in (("float8_e4m3fn", 64), ("float8_e5m2", 128)):
        arguments = problem(kv=kv, page=page, tokens=20, batch=3, width=9)
        packed = torch.zeros(5, 2, page, 256, dtype=torch.float32).to(getattr(torch, kv))
        arguments[3], arguments[4] = packed[..., :128], packed[..., 128:]
        arguments[6] = arguments[6].new_zeros(3, 12)[:, :9]
        attend(*arguments, 0, True, WIDENED)
        build, widen, forward = driver.launches
        driver.launches.clear()
        assert build.params[-1] == 1 and driver.last_overlap == 1
        assert widen.entry == f"m3s_prefill_widen_{SHORT[kv]}_sm90a_0" and widen.grid == (27, 2, 1)
        k, v = packed.data_ptr(), packed.data_ptr() + 128
        copies = widen.params[2:4]
        assert copies[1] - copies[0] == 27 * 2 * page * 256
        strides = [2 * page * 256, page * 256, 256]
        assert widen.params == [k, v, *copies, arguments[6].data_ptr(), arguments[8].data_ptr(), 0, *strides, *strides,
                                48, 9, 5, 7 if page == 128 else 6, 2]  # fmt: skip
        assert forward.entry == "m3s_prefill_union_f16_sm90a_0" and forward.params[-2] == 1
        for found, base in zip(forward.params[1:3], copies):
            assert found.base == base and list(found.extents) == [128, page, 2, 27]
            assert list(found.strides) == [256, page * 256, 2 * page * 256] and list(found.box) == [64, page, 1, 1]
    arguments = problem(kv="float8_e4m3fn", tokens=4096)
    arguments[3], arguments[4] = (x.reshape(-1, 2, 1, 128) for x in arguments[3:5])
    attend(*arguments, 0, True, UNION)
    assert "prefill_union_e4m3" in driver.launches.pop().entry
    assert "only a float8 cache of pages" in error_of(attend, *arguments, 0, True, WIDENED)
    assert "only a float8 cache of pages" in error_of(attend, *problem(), 0, True, WIDENED)


@check
def a_shape_decides_when_a_cache_is_widened(driver):
    # Mirrors `union_widens` of launch/prefill_union.cpp.
    attend = operators().aot_sparse_attention
    for kv, tokens, batch, width, want in (
        ("float8_e4m3fn", 1024, 1, 128, True), ("float8_e4m3fn", 1023, 1, 64, False),
        ("float8_e4m3fn", 1024, 1, 129, False), ("float8_e5m2", 2048, 2, 128, True),
        ("float8_e5m2", 40000, 4, 512, True), ("float8_e5m2", 40000, 4, 513, False), ("bfloat16", 1024, 1, 16, False),
    ):  # fmt: skip
        for formulation in (UNION, BY_SEQUENCE):
            attend(*problem(kv=kv, tokens=tokens, batch=batch, width=width), 0, True, formulation)
            names = [launch.entry.partition("_sm90a")[0] for launch in driver.launches]
            widened = f"m3s_prefill_widen_{SHORT[kv]}" in names
            assert widened == want == driver.launches[0].params[-1], (kv, tokens, batch, width)
            if widened:
                widen = driver.launches[names.index(f"m3s_prefill_widen_{SHORT[kv]}")]
                choice = driver.launches[1].params[2] if formulation == BY_SEQUENCE else 0
                assert widen.params[6] == choice
            driver.launches.clear()


@check
def the_choice_goes_to_both_formulations(driver):
    attend = operators().aot_sparse_attention
    attend(*problem(), 0, True, BY_SEQUENCE)
    names = [launch.entry.partition("_sm90a")[0] for launch in driver.launches]
    assert names[:3] == ["m3s_union_lists", "m3s_union_choice", "m3s_prefill_union_bf16"]
    assert names[3] == "m3s_invert_count" and len(names) > 5
    choice = driver.launches[1].params[2]
    assert driver.launches[2].params[7] == choice and driver.launches[3].params[4] == choice


@check
def the_threshold_follows_the_cache(driver):
    attend = operators().aot_sparse_attention
    for kv, tokens, threshold in (
        ("bfloat16", 2000, 1.75), ("float8_e4m3fn", 1000, 1.5), ("float8_e5m2", 1000, 1.5), ("float8_e4m3fn", 2000, 1.75),
    ):  # fmt: skip
        driver.launches.clear()
        attend(*problem(kv=kv, tokens=tokens), 0, True, BY_SEQUENCE)
        assert driver.launches[1].params[-1] == threshold


@check
def absent_outputs_and_scales_are_null(driver):
    arguments = problem()
    arguments[1] = None
    operators().aot_sparse_attention(*arguments, 0, True, UNION)
    params = driver.launches[-1].params
    assert params[9:12] == [0, 0, 0] and params[14:18] == [0, 0, 0, 0]


@check
def the_grid_is_no_larger_than_the_device(driver):
    attend = operators().aot_sparse_attention
    for tokens, ctas in ((100, 2 * (12 + 3)), (512, 132), (2000, 132)):
        attend(*problem(tokens=tokens), 0, True, UNION)
        assert driver.launches[-1].grid == (ctas, 1, 1)


@check
def a_shape_decides_between_decode_and_prefill(driver):
    # Mirrors `is_decode` of launch/prefill.cpp.
    for tokens, batch, heads, want in (
        (16, 1, (64, 4), DECODE), (128, 1, (64, 4), DECODE), (129, 1, (64, 4), BY_SEQUENCE), (320, 10, (64, 4), DECODE),
        (321, 10, (64, 4), BY_SEQUENCE), (512, 1, (16, 1), DECODE), (513, 1, (16, 1), BY_SEQUENCE),
    ):  # fmt: skip
        assert plan(problem(tokens=tokens, batch=batch, heads=heads)) == want, (tokens, batch, heads)
    assert plan(problem(heads=(16, 2))) == KV_STATIONARY
    assert plan(problem(heads=(4, 4), tokens=3000)) == KV_STATIONARY
    for forced in (UNION, KV_STATIONARY, DECODE, BY_SEQUENCE):
        assert plan(problem(), forced) == forced
    assert plan(problem(width=65536), 0) in (KV_STATIONARY, DECODE)
    assert plan(problem(tokens=0)) == DECODE
    assert not driver.launches


@check
def a_forced_formulation_that_cannot_run_says_why(driver):
    attend = operators().aot_sparse_attention
    assert "16 query heads a KV head" in error_of(attend, *problem(heads=(16, 2)), 0, True, UNION)
    assert "formulation: expected 0" in error_of(attend, *problem(), 0, True, 6)
    assert not driver.launches


@check
def other_architectures_take_their_own_programs(driver):
    for capability in (100, 103):
        driver.set_capability(capability)
        assert plan(problem()) == BY_SEQUENCE and plan(problem(tokens=16)) == DECODE
        driver.launches.clear()
        operators().aot_sparse_attention(*problem())
        launches, end = driver.launches, f"_sm{capability}a_0"
        assert all(launch.entry.endswith(end) for launch in launches)
        assert launches[1].params[-1] == 1.25
        assert launches[2].entry == "m3s_prefill_union_bf16" + end and launches[2].block == (384, 1, 1)
        assert launches[2].grid == (148, 1, 1) and launches[-2].entry == "m3s_prefill_bf16_bf16_r16" + end


@check
def reports_its_workspace(driver):
    """By formulation, what a call allocates beside its results; never more than 1 GiB for 131,072 tokens of 64/4 heads."""
    import torch

    plan_of = operators().aot_attention_plan
    for tokens, width in ((40, 4), (4096, 64), (131072, 1024)):
        q, cache = torch.empty(tokens, 64, 128, dtype=torch.bfloat16), torch.zeros(4, 4, 128, 128, dtype=torch.bfloat16)
        ids = torch.zeros(1, 4, 16, dtype=torch.int32).expand(tokens, 4, 16)
        table, cu, used = (torch.zeros(n, dtype=torch.int32) for n in ((1, width), 2, 1))
        arguments = (ids, table, cu, used, True)
        found = {number: plan_of(q, cache, cache, *arguments, number).tolist() for number in (1, 2, 3, 4)}
        assert all(number == plan for number, (plan, _) in found.items())
        union, kv_stationary, decode, both = (found[number][1] for number in (1, 2, 3, 4))
        lists = operators().aot_union_lists(q, cache, ids, table, cu, used, True)
        assert union == lists.numel() and decode == 0 and kv_stationary > 0
        assert both == union + kv_stationary <= 1 << 30
        # A float8 cache widened first: while the copies are there, the partial results are not.
        cache = cache.to(torch.float8_e4m3fn)
        found = {number: plan_of(q, cache, cache, *arguments, number)[1].item() for number in (1, 2, 4, 5)}
        copies, partials = 2 * width * 4 * 128 * 256, found[2]
        assert found[5] == union + copies and found[1] == union + (0 if tokens < 1024 else copies)
        assert found[4] == union + max(partials, 0 if tokens < 1024 else copies) <= 1 << 30
    driver.launches.clear()


@needs_variant
@pytest.mark.parametrize("name", check.functions)
def test_launch(name):
    check.run(name)


if __name__ == "__main__":
    check.main()
