"""The dense kernel's launches without a GPU: what the C++ side packs, checked against the manifest and the tensors.

Each check runs in a process of its own (`python tests/test_dense.py NAME`), where recording_driver.c is the CUDA driver.
What the kernel computes is tested in tests/gpu/test_dense_gpu.py.
"""

import sys

import pytest
from launch_checks import VARIANTS, LaunchChecks, error_of, needs_variant, operators

check = LaunchChecks(__file__)
MULTIPROCESSORS = 132  # of the recorded device
NAMES = [
    "out",
    "lse",
    "q",
    "k_cache",
    "v_cache",
    "table",
    "cu",
    "used",
    "softmax_scale",
    "causal",
    "k_scale",
    "v_scale",
]


def ceil_div(a, b):
    return -(-a // b)


def dense_plan(tokens, requests, q_heads, kv_heads, reach, multiprocessors=MULTIPROCESSORS):
    """(rows, neighbours_log2, splits): the choice of torch-ext/launch/dense.cpp."""
    group = q_heads // kv_heads
    rows = 64 if tokens * group <= 64 * requests else 128
    tiles = requests * ceil_div(ceil_div(tokens, requests), rows // group) * kv_heads
    most = max(1, min(32, reach // 512, (16 << 20) // (tokens * q_heads * 129 * 4)))
    blocks = ceil_div(reach, 128)

    def time(splits):
        waves = ceil_div(tiles * splits, multiprocessors)
        work = max(waves * (2 * ceil_div(blocks, splits) + 5), 2 * ceil_div(requests * kv_heads * blocks, 100))
        return work + (5 + splits if splits > 1 else 0)

    side_by_side = [n for n in range(8) if kv_heads % 2**n == 0 and (n == 0 or 2**n * reach * 512 <= 32 << 20)]
    return rows, max(side_by_side), min(range(1, most + 1), key=time)


def grid(tokens, requests, tile_tokens, kv_heads, neighbours_log2, splits):
    tiles = (tokens + (requests + 1) * (tile_tokens - 1)) // tile_tokens
    return tiles << neighbours_log2, kv_heads >> neighbours_log2, splits


def program(dtype, rows):
    return f"m3s_dense_{'bf16' if dtype == 'bfloat16' else 'f16'}_m{rows}_sm90a_0"


def problem(dtype="bfloat16", tokens=30, batch=2, heads=(32, 2), pages=5, page=128, width=3):
    """Positional arguments of the operator, contiguous."""
    import torch

    kind = getattr(torch, dtype)
    query = torch.zeros(tokens, heads[0], 128, dtype=kind)
    k_cache, v_cache = (torch.zeros(pages, heads[1], page, 128, dtype=kind) for _ in range(2))
    table = torch.zeros(batch, width, dtype=torch.int32)
    cu, used = torch.zeros(batch + 1, dtype=torch.int32), torch.zeros(batch, dtype=torch.int32)
    out, lse = torch.empty_like(query), torch.empty(tokens, heads[0])
    return [out, lse, query, k_cache, v_cache, table, cu, used, 0.25, True, None, None]


@check
def packs_every_parameter(driver):
    import torch

    attend = operators().aot_dense_attention
    for dtype, page, causal, tokens in (
        ("bfloat16", 128, True, 30), ("float16", 64, False, 30), ("bfloat16", 64, True, 5), ("float16", 128, True, 8),
    ):  # fmt: skip
        kind = getattr(torch, dtype)
        query = torch.zeros(tokens, 34, 160, dtype=kind)[:, 1:33, 16:144]
        out = torch.zeros(32, tokens, 128, dtype=kind).transpose(0, 1)
        packed = torch.zeros(5, 2, page, 256, dtype=kind)
        k_cache, v_cache = packed[..., :128], packed.transpose(1, 2).contiguous().transpose(1, 2)[..., 128:]
        table = torch.zeros(2, 9, dtype=torch.int32)[:, :3]
        cu, used = torch.zeros(3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
        lse = torch.zeros(tokens, 40)[:, :32]
        k_scale, v_scale = torch.ones(2), torch.ones(1)
        attend(out, lse, query, k_cache, v_cache, table, cu, used, 0.25, causal, k_scale, v_scale)
        launch = driver.launches.pop()
        rows, neighbours_log2, splits = dense_plan(tokens, 2, 32, 2, 3 * page)
        tile = rows // 16
        assert splits == 1 and launch.entry == program(dtype, rows)
        assert launch.grid == grid(tokens, 2, tile, 2, neighbours_log2, 1) and launch.block == (128 + 2 * rows, 1, 1)
        assert launch.shared_bytes == driver.manifests[launch.entry]["dynamic_smem"]
        q_map, *maps = launch.params[:3]
        assert (q_map.base, q_map.extents, q_map.box) == (query.data_ptr(), (128, 16, 2, tokens), (64, 16, 1, tile))
        assert q_map.strides == (160 * 2, 16 * 160 * 2, 34 * 160 * 2) and q_map.swizzle == 3
        for found, cache in zip(maps, (k_cache, v_cache)):
            assert (found.base, found.extents, found.box) == (cache.data_ptr(), (128, page, 2, 5), (64, page, 1, 1))
            assert found.strides == tuple(2 * cache.stride(i) for i in (2, 1, 0)) and found.swizzle == 3
        want = [t.data_ptr() for t in (table, cu, used, out, lse, k_scale, v_scale)]
        want += [36, 0, *(2 * s for s in out.stride()[:2]), 0, *(4 * s for s in lse.stride()), 4, 0]
        want += [tokens, 2, 3, 5, int(page == 64), 3 * page, 16, tile, neighbours_log2, int(causal), 1, 0.25]
        assert launch.params[3:] == want
    assert not driver.launches


@check
def splits_write_states_and_merge_them(driver):
    import torch

    attend = operators().aot_dense_attention
    arguments = problem(tokens=4, batch=2)
    for lse in (arguments[1], None):
        arguments[1] = lse
        attend(*arguments, 3)
        merge, launch = driver.launches.pop(), driver.launches.pop()
        assert launch.entry == program("bfloat16", 64) and launch.grid[1:] == (1, 3)
        states, lses = launch.params[6:8]
        assert launch.params[11:17] == [4 * 32 * 512, 32 * 512, 512, 4 * 32 * 4, 32 * 4, 4]
        assert launch.params[-2] == 3
        assert merge.entry == "m3s_combine_f32_bf16_sm90a_0"
        assert merge.params[0] == arguments[0].data_ptr() and merge.params[2:4] == [states, lses]
        assert (merge.params[1] == lse.data_ptr()) if lse is not None else merge.params[1]
    half = problem("float16", tokens=4)
    attend(*half, 2)
    assert driver.launches.pop().entry == "m3s_combine_f32_f16_sm90a_0"
    del driver.launches[:]
    assert arguments[0].dtype == torch.bfloat16


@check
def absent_outputs_and_scales_are_null(driver):
    arguments = problem()
    arguments[1] = None
    operators().aot_dense_attention(*arguments)
    params = driver.launches.pop().params
    assert params[7:10] == [0, 0, 0] and params[14:19] == [0, 0, 0, 0, 0]


@check
def overlapping_pages_are_no_copy(driver):
    """transformers' contiguous caches: a page starts at every token."""
    import torch

    arguments = problem(heads=(16, 2), batch=1)
    dense = torch.zeros(1, 2, 300, 128, dtype=torch.bfloat16)
    arguments[3] = arguments[4] = dense.as_strided((300 - 127, 2, 128, 128), (128, 300 * 128, 128, 1))
    arguments[5] = torch.zeros(1, 2, dtype=torch.int32)
    operators().aot_dense_attention(*arguments)
    found = driver.launches.pop().params[1]
    assert (found.base, found.extents) == (dense.data_ptr(), (128, 128, 2, 173))
    assert found.strides == (256, 300 * 256, 256)


@check
def the_adapter_copies_no_contiguous_cache(driver):
    """A dense layer of transformers, prefill and a decode step, as on an SM90 device."""
    import importlib.util
    import types

    import torch

    place = VARIANTS[0] / "__init__.py"
    spec = importlib.util.spec_from_file_location("m3_sparse", place, submodule_search_locations=[str(place.parent)])
    sys.modules["m3_sparse"] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    from m3_sparse import capability
    from m3_sparse.transformers import flash_attn_forward

    capability.architecture = lambda device: "sm_90"
    layer = types.SimpleNamespace(indexer=None, layer_idx=1)
    for q_len, kv_len in ((256, 256), (1, 1024), (130, 130), (1, 77)):
        query = torch.zeros(2, 16, q_len, 128, dtype=torch.bfloat16)
        key, value = (torch.zeros(2, 2, kv_len, 128, dtype=torch.bfloat16) for _ in range(2))
        out, _ = flash_attn_forward(layer, query, key, value, None, scaling=0.25)
        launch = next(x for x in driver.launches if "dense" in x.entry)
        for found, cache in zip(launch.params[1:3], (key, value)):
            assert found.base == cache.data_ptr() and found.strides[1:] == (kv_len * 256, 256)
            # Both rows' keys, to the last one: a box of 128 starts at any of them and ends with them.
            assert found.extents == (128, 1, 2, 2 * kv_len + kv_len) and found.box == (64, 1, 1, 128)
        assert out.shape == (2, q_len, 16, 128) and launch.params[-1] == 0.25 and launch.params[-3] == 1
        del driver.launches[:]


@check
def chooses_the_plan_by_shape(driver):
    attend = operators().aot_dense_attention
    for tokens, requests, heads, width in (
        (1, 1, (64, 4), 256), (16, 16, (64, 4), 256), (64, 64, (64, 4), 256), (40, 40, (64, 4), 256), (1, 1, (64, 4), 3),
        (4, 1, (64, 4), 64), (5, 1, (64, 4), 64), (128, 1, (64, 4), 512), (512, 1, (64, 4), 512), (33, 1, (1, 1), 512),
        (3000, 7, (64, 4), 8), (3000, 7, (24, 12), 80), (9, 3, (12, 1), 100), (1, 1, (5, 1), 9000), (132, 132, (16, 1), 64),
    ):  # fmt: skip
        attend(*problem(tokens=tokens, batch=requests, heads=heads, width=width))
        rows, neighbours_log2, splits = dense_plan(tokens, requests, *heads, width * 128)
        if splits > 1:
            driver.launches.pop()
        launch = driver.launches.pop()
        tile = rows // (heads[0] // heads[1])
        case = (tokens, requests, heads, width)
        assert launch.entry == program("bfloat16", rows) and launch.params[-2] == splits, case
        assert launch.params[-4] == neighbours_log2, case
        assert launch.grid == grid(tokens, requests, tile, heads[1], neighbours_log2, splits), case
        assert not driver.launches
    assert dense_plan(1, 1, 64, 4, 32768) == (64, 1, 20) and dense_plan(64, 64, 64, 4, 32768) == (64, 1, 1)
    assert dense_plan(16, 16, 64, 4, 32768) == (64, 1, 2) and dense_plan(8192, 1, 64, 4, 8192) == (128, 2, 1)
    assert dense_plan(32768, 1, 64, 4, 32768) == (128, 1, 1) and dense_plan(16384, 2, 16, 16, 8192) == (128, 3, 1)


@check
def an_empty_problem_launches_nothing(driver):
    import torch

    attend = operators().aot_dense_attention
    attend(*problem(tokens=0))
    for arguments in (problem(batch=0), problem(pages=0)):
        arguments[0].fill_(float("nan"))
        attend(*arguments)
        assert not arguments[0].any() and bool((arguments[1] == -torch.inf).all())
    assert not driver.launches


@check
def blackwell_takes_stages_of_128_rows(driver):
    attend = operators().aot_dense_attention
    for capability, arch in ((100, "sm100a"), (103, "sm103a")):
        driver.set_capability(capability)
        for heads, tokens, rows in (
            ((64, 4), 8, 128), ((64, 4), 9, 256), ((12, 1), 10, 128), ((12, 1), 11, 256), ((2, 2), 128, 128), ((1, 1), 129, 256),
        ):  # fmt: skip
            group = heads[0] // heads[1]
            arguments = problem(tokens=tokens, batch=1, heads=heads)
            attend(*arguments)
            launch = driver.launches.pop()
            stage, tile = 128 // group, rows // 128 * (128 // group)
            assert launch.entry == f"m3s_dense_bf16_m{rows}_{arch}_0" and launch.block == (512, 1, 1)
            assert launch.params[0].box == (64, group, 1, stage) and launch.params[-5] == tile
            neighbours_log2 = launch.params[-4]
            assert launch.grid == grid(tokens, 1, tile, heads[1], neighbours_log2, 1)
            assert launch.shared_bytes == driver.manifests[launch.entry]["dynamic_smem"] <= 227 << 10
    assert not driver.launches


@check
def other_devices_are_refused(driver):
    driver.set_capability(89)
    assert "compute capabilities 10.0, 10.3; the device has 8.9" in error_of(
        operators().aot_dense_attention, *problem()
    )
    assert not driver.launches


@check
def refuses_what_would_leave_a_tensor(driver):
    import torch

    attend = operators().aot_dense_attention

    def refused(message, **changes):
        arguments = problem()
        for name, change in changes.items():
            i = NAMES.index(name)
            arguments[i] = change(arguments[i]) if callable(change) else change
        text = error_of(attend, *arguments)
        assert message in text, (message, text)

    narrow = torch.zeros(30, 32, 130, dtype=torch.bfloat16)
    refused("q: expected [T, Hq, 128]", q=lambda x: x[0])
    refused("q: expected 1 to 16 query heads", q=lambda x: x[:, :31], out=lambda x: x[:, :31])
    refused("q: expected 1 to 16 query heads", q=lambda x: x.repeat(1, 2, 1), out=lambda x: x.repeat(1, 2, 1))
    seventeen = torch.zeros(30, 34, 128, dtype=torch.bfloat16)
    refused("q: expected 1 to 16 query heads", q=seventeen, out=seventeen, lse=torch.zeros(30, 34))
    refused("out: expected shape and dtype of q", out=lambda x: x[:2])
    refused("out: expected shape and dtype of q", out=lambda x: x.half())
    refused("lse: expected float32 [T, Hq]", lse=lambda x: x[:, :5])
    refused("lse: expected float32 [T, Hq]", lse=lambda x: x.double())
    refused("k_cache: expected [P, Hkv, 64 or 128, 128]", k_cache=lambda x: x[:, :, :32])
    refused("v_cache: expected the shape of k_cache", v_cache=lambda x: x[:4])
    refused("expected one dtype, bfloat16 or float16", v_cache=lambda x: x.half())
    float8 = {name: lambda x: x.to(torch.float8_e4m3fn) for name in ("k_cache", "v_cache")}
    refused("expected one dtype, bfloat16 or float16", **float8)
    refused("cu_seqlens_q: expected contiguous int32 [B + 1]", cu=lambda x: x[:2])
    refused("seqused_k: expected contiguous int32 [B]", used=lambda x: x.long())
    refused("block_table: expected int32 [B, M]", table=lambda x: x[:1])
    refused("block_table: expected int32 [B, M]", table=lambda x: x.t().contiguous().t())
    refused("k_scale: expected float32, contiguous, with 1 or Hkv", k_scale=torch.ones(3))
    refused("v_scale: expected float32, contiguous, with 1 or Hkv", v_scale=torch.ones(1, dtype=torch.float64))
    refused("q, out: expected 16-byte aligned", q=narrow[..., :128])
    refused("q, out: expected 16-byte aligned", out=narrow[..., 1:129])
    shifted = torch.zeros(5 * 2 * 128 * 128 + 1, dtype=torch.bfloat16)[1:].view(5, 2, 128, 128)
    refused("k_cache, v_cache: expected 16-byte aligned", v_cache=shifted)
    refused("expected strides above 0", k_cache=lambda x: x[:1].expand(5, 2, 128, 128))
    assert "splits: expected 0" in error_of(attend, *problem(), 33)
    assert "splits: expected 0" in error_of(attend, *problem(), -1)
    assert not driver.launches


@needs_variant
@pytest.mark.parametrize("name", check.functions)
def test_launch(name):
    check.run(name)


if __name__ == "__main__":
    check.main()
