"""The KV-stationary prefill's launches without a GPU: what the C++ side packs, checked against manifests and tensors.

Each check runs in a process of its own (`python tests/test_prefill.py NAME`), where recording_driver.c is the CUDA driver.
What the kernels compute is tested in tests/gpu/test_prefill_gpu.py; tests/test_invert.py looks at the plan.
"""

import functools
import itertools

import pytest
from launch_checks import LaunchChecks, attention_problem, error_of, needs_variant, operators

check = LaunchChecks(__file__)
MULTIPROCESSORS = {90: 132, 100: 148, 103: 148}  # of the recorded device
PLACES = 3
EVICT_NORMAL, EVICT_LAST = 0x1000000000000000, 0x14F0000000000000
COMBINE_TOKENS, COUNTERS = 37, 40  # places in a forward's parameters
STAGES = ("invert_count", "invert_scan", "invert_scatter")


def entry(program, arch="sm90a"):
    return f"m3s_{program}_{arch}_0"


problem = functools.partial(attention_problem, tokens=300, pages=9, width=6)


def launches(driver, *arguments):
    """Of one call, in order."""
    operators().aot_sparse_attention_kv_stationary(*arguments)
    result = list(driver.launches)
    driver.launches.clear()
    return result


@check
def packs_every_parameter(driver):
    import torch

    short = {"bfloat16": "bf16", "float16": "f16", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
    pairs = [(q, kv) for q in ("bfloat16", "float16") for kv in (q, "float8_e4m3fn", "float8_e5m2")]
    shapes = [(pair, shape) for pair in pairs for shape in ((16, 128), (8, 64), (3, 128))]
    for capability, ((q, kv), (group, page)) in [(c, shape) for c in MULTIPROCESSORS for shape in shapes]:
        driver.set_capability(capability)
        multiprocessors, arch = MULTIPROCESSORS[capability], f"sm{capability}a"
        qt, kt = getattr(torch, q), getattr(torch, kv)
        size, rows, heads, tokens = kt.itemsize, 16 if group > 8 else 8, 2, 300
        wide = torch.zeros(tokens, heads * group + 2, 160, dtype=qt)
        query = wide[:, 1 : 1 + heads * group, 16:144]
        out = torch.zeros(heads * group, tokens, 128, dtype=qt).transpose(0, 1)
        packed = torch.zeros(9, heads, page, 256, dtype=torch.float32).to(kt)
        k_cache, v_cache = packed[..., :128], packed.transpose(1, 2).contiguous().transpose(1, 2)[..., 128:]
        ids = torch.zeros(7, heads, tokens, dtype=torch.int32).permute(2, 1, 0)
        table = torch.zeros(2, 9, dtype=torch.int32)[:, :6]
        cu, used = torch.zeros(3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
        formulation = torch.ones(2, dtype=torch.int32)
        lse = torch.zeros(tokens, 90)[:, : heads * group]
        k_scale, v_scale = torch.ones(heads), torch.ones(1)
        arguments = (out, lse, query, k_cache, v_cache, ids, table, cu, used, 0.25, page == 64, k_scale, v_scale)
        count, scan, scatter, forward, combine = launches(driver, *arguments, formulation)
        blocks, page_bits, causal = 6 * page // 128, 7 if page == 128 else 6, int(page == 64)
        units, segments, tile = 2 + 2, 1 + 2, 128 // rows
        tiles = tokens * heads * 7 // tile + segments * heads * blocks
        where = [ids.data_ptr(), table.data_ptr(), cu.data_ptr(), used.data_ptr()]
        strides = [s * 4 for s in ids.stride()] + [table.stride(0) * 4]
        shape = [tokens, 2, heads, 7, 6, 9, page_bits, 6 * page, blocks, causal]

        assert [x.entry for x in (count, scan, scatter)] == [entry(name, arch) for name in STAGES]
        assert count.grid == scatter.grid == (units, heads, 1) and scan.grid == (segments, heads, 1)
        counts, state = count.params[5:7]
        assert count.params[:5] == [*where, formulation.data_ptr()] and count.params[7:] == strides + shape
        bins, row_tiles, counters = scan.params[4:7]
        assert scan.params[:4] == [cu.data_ptr(), used.data_ptr(), formulation.data_ptr(), counts]
        tile_bits = 3 if rows == 16 else 4
        assert scan.params[7:] == [tokens, 2, heads, 6 * page, blocks, 11, heads, tile_bits, 1]
        chunks, tile_heads, entries = scatter.params[8:11]
        assert scatter.params[:8] == [*where, state, counts, bins, row_tiles]
        assert scatter.params[11:] == [*strides, *shape, 11, heads, tile_bits, segments, tiles]

        assert forward.entry == entry(f"prefill_{short[q]}_{short[kv]}_r{rows}", arch)
        assert forward.grid == (multiprocessors, 1, 1) and forward.block == (512, 1, 1)
        assert forward.shared_bytes == driver.manifests[forward.entry]["dynamic_smem"] <= 227 * 1024
        q_map, *kv_maps = forward.params[:3]
        assert (q_map.base, q_map.extents, q_map.box) == (query.data_ptr(), (128, heads * group, tokens), (64, rows, 1))
        assert q_map.strides == (160 * 2, (heads * group + 2) * 160 * 2) and q_map.swizzle == 3
        for cache, tensor_map in zip((k_cache, v_cache), kv_maps):
            assert tensor_map.base == cache.data_ptr() and tensor_map.extents == (128, page, heads, 9)
            assert tensor_map.strides == tuple(cache.stride(i) * size for i in (2, 1, 0))
            assert tensor_map.box == (64 if size == 2 else 128, page, 1, 1) and tensor_map.swizzle == 3
        partials, sums = forward.params[6:8]
        assert forward.params[3:6] == [chunks, tile_heads, entries]
        assert forward.params[8:12] == [k_scale.data_ptr(), 4, EVICT_LAST, EVICT_NORMAL]
        assert forward.params[12:17] == [0, 0, tokens, 0, heads]
        assert forward.params[17:25] == [heads, group, 7, page_bits, tiles, 0, 0, 0.25]
        assert forward.params[COMBINE_TOKENS] == 0, "nothing to combine beside the first chunk"
        assert forward.params[COUNTERS:] == [counters, 1, 0, 11, tokens, tokens * heads * 7]

        assert combine.entry == entry(f"prefill_combine_{short[q]}_r{rows}", arch)
        assert combine.grid == (min(tokens * heads, 6 * multiprocessors), 1, 1)
        assert combine.params[:6] == [partials, sums, state, out.data_ptr(), lse.data_ptr(), v_scale.data_ptr()]
        lse_strides = [s * 4 for s in lse.stride()]
        assert forward.params[COUNTERS - 1] == 1
        combine_shape = [0, 0, tokens, 0, heads, heads, group, 7, 1]
        assert combine.params[6:] == [s * 2 for s in out.stride()[:2]] + lse_strides + combine_shape
        assert driver.last_overlap == 1

        # The parts of the workspace don't meet.
        parts = {
            counts: units * heads * blocks * 4, state: tokens * heads * 8, bins: segments * heads * blocks * 8,
            row_tiles: segments * heads * 4, chunks: 8, counters: 16, tile_heads: tiles * 32, entries: tiles * tile * 4,
            partials: tokens * heads * 7 * rows * 256, sums: tokens * heads * 7 * rows * 8,
        }  # fmt: skip
        places = sorted(parts.items())
        assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(places))
        assert all(a % 256 == places[0][0] % 256 for a, _ in places)


@check
def small_tensors_lose_a_mark_on_blackwell(driver):
    """Of the driver in their tensor maps (launch/tensor_map.cpp)."""
    import torch

    for capability in MULTIPROCESSORS:
        driver.set_capability(capability)
        for pages in (1, 3, 4, 5):  # of 32 KiB a head and page
            arguments = problem(heads=(16, 1), tokens=1, pages=pages)
            arguments[4] = torch.zeros(pages, 1, 128, 256, dtype=torch.bfloat16)[..., 128:]
            q_map, k_map, v_map = launches(driver, *arguments)[3].params[:3]
            marks = [x.marks == 2**64 - 1 for x in (q_map, k_map, v_map)]
            small = [True, pages < 4, pages < 3]
            assert marks == [capability == 90 or not x for x in small], (capability, pages)
            assert all(x.marks | 1 << 21 == 2**64 - 1 for x in (q_map, k_map, v_map))


@check
def a_launch_combines_the_chunk_before(driver):
    """Blackwell: a launch a chunk."""
    driver.set_capability(100)
    for chunk_heads in (2, 1):
        arguments = problem(tokens=1500)
        first, *rest = launches(driver, *arguments, None, 8, chunk_heads)[3:]
        forwards, last = [first, *rest[:-1]], rest[-1]
        tokens = [256] * 5 + [1500 - 5 * 256]
        chunks = [(256 * i, n, head) for head in range(0, 2, chunk_heads) for i, n in enumerate(tokens)]
        assert len(forwards) == len(chunks)
        for i, launch in enumerate(forwards):
            assert launch.entry == entry("prefill_bf16_bf16_r16", "sm100a")
            assert launch.params[12:17] == [i, *chunks[i], chunk_heads] and launch.params[22] == int(i > 0)
            assert launch.params[6:8] == forwards[i % PLACES].params[6:8]
            if i:
                assert launch.params[25:27] == forwards[i - 1].params[6:8]
                assert launch.params[COUNTERS - 4 : COUNTERS] == [*chunks[i - 1], 0]
            assert launch.params[COUNTERS + 1 : COUNTERS + 3] == [1, 0]
        assert len({x.params[6] for x in forwards}) == PLACES
        assert last.entry == entry("prefill_combine_bf16_r16", "sm100a") and last.grid == (
            chunk_heads * tokens[-1],
            1,
            1,
        )
        assert last.params[:2] == forwards[-1].params[6:8] and last.params[11:15] == [*chunks[-1], chunk_heads]


@check
def one_launch_goes_through_all_chunks(driver):
    """SM90; it combines all but the last one."""
    driver.set_capability(90)
    for chunk_heads in (2, 1):
        _, scan, _, forward, last = launches(driver, *problem(tokens=1500), None, 8, chunk_heads)
        count, slots = 6 * 2 // chunk_heads, 256 * chunk_heads * 16
        assert forward.entry == entry("prefill_bf16_bf16_r16") and scan.params[-1] == count
        assert forward.params[12] == forward.params[22] == 0
        assert forward.params[COUNTERS:] == [scan.params[6], count, count - 1, 8, 1500, slots]
        assert last.entry == entry("prefill_combine_bf16_r16")
        place = (count - 1) % PLACES
        assert last.params[0] == forward.params[6] + place * slots * 4096
        assert last.params[1] == forward.params[7] + place * slots * 128
        assert last.params[11:15] == [1280, 220, 2 - chunk_heads, chunk_heads]


@check
def wide_selections_are_combined_apart(driver):
    driver.set_capability(90)
    stages = launches(driver, *problem(tokens=600, topk=32), None, 8, 2)
    counters, stages = stages[1].params[6], stages[3:]
    names = [x.entry for x in stages]
    assert names == [entry("prefill_bf16_bf16_r16"), entry("prefill_combine_bf16_r16_wide")] * 3
    assert [x.grid for x in stages[1::2]] == [(512, 1, 1), (512, 1, 1), (176, 1, 1)]
    for i, forward in enumerate(stages[::2]):
        assert forward.params[12] == i and forward.params[COMBINE_TOKENS] == 0
        assert forward.params[COUNTERS : COUNTERS + 3] == [counters + 16 * i, 1, 0]
        assert forward.params[6:8] == stages[2 * i + 1].params[:2]


@check
def absent_outputs_scales_and_formulation_are_null(driver):
    arguments = problem(page=64)
    arguments[1] = None
    count, scan, _, forward, combine = launches(driver, *arguments)
    assert count.params[4] == scan.params[2] == 0
    assert forward.params[8:10] == [0, 0]
    assert combine.params[4:6] == [0, 0] and combine.params[8:11] == [0, 0, 0]


@check
def chunks_follow_from_the_shape(driver):
    """Few heads, many tokens; at most 272 MiB of partials; some twenty tiles for a CTA."""
    for tokens, heads, table, want in (
        (17, (64, 4), 6, (10, 4)), (300, (64, 4), 6, (10, 4)), (512, (64, 4), 6, (11, 2)), (1024, (64, 4), 6, (11, 1)), (9000, (64, 4), 6, (11, 1)),
        (9000, (64, 4), 1024, (12, 1)), (9000, (8, 1), 513, (12, 1)), (100, (12, 6), 6, (10, 6)),
    ):  # fmt: skip
        params = launches(driver, *problem(tokens=tokens, heads=heads, width=table))[1].params
        assert tuple(params[12:14]) == want, (tokens, heads, params[12:14])


@check
def strides_beyond_32_bits_survive(driver):
    arguments = problem(tokens=1, pages=1)
    arguments[0] = arguments[0].as_strided((1, 32, 128), (2**40, 128, 1))
    arguments[5] = arguments[5].as_strided((1, 2, 16), (2**40, 16, 1))
    stages = launches(driver, *arguments)
    assert stages[0].params[7] == stages[2].params[11] == 2**42 and stages[4].params[6] == 2**41


@check
def an_empty_problem_launches_nothing(driver):
    assert not launches(driver, *problem(tokens=0))
    arguments = problem(batch=0)
    arguments[0].fill_(float("nan"))
    assert not launches(driver, *arguments)
    assert not arguments[0].any() and bool((arguments[1] == -float("inf")).all())


@check
def refuses(driver):
    attend = operators().aot_sparse_attention_kv_stationary
    arguments = problem()
    arguments[3] = arguments[3][:1].expand(9, 2, 128, 128)
    assert "tensor map" in error_of(attend, *arguments)
    arguments = problem()
    arguments[2] = arguments[2][:, :1].expand(300, 32, 128)
    assert "strides of q" in error_of(attend, *arguments)
    arguments = problem(tokens=3000, batch=1100, heads=(4, 4), width=8192)
    assert "too large lists" in error_of(attend, *arguments)
    assert "chunk_bits" in error_of(attend, *problem(), None, 7)
    assert "chunk_heads" in error_of(attend, *problem(heads=(32, 4)), None, 8, 3)
    import torch

    assert "formulation" in error_of(attend, *problem(), torch.ones(3, dtype=torch.int32))
    assert not driver.launches


@needs_variant
def test_parameters():
    check.run(
        "packs_every_parameter",
        "small_tensors_lose_a_mark_on_blackwell",
        "absent_outputs_scales_and_formulation_are_null",
    )


@needs_variant
def test_chunks():
    check.run(
        "a_launch_combines_the_chunk_before",
        "one_launch_goes_through_all_chunks",
        "wide_selections_are_combined_apart",
        "chunks_follow_from_the_shape",
    )


@needs_variant
def test_strides():
    check.run("strides_beyond_32_bits_survive")


@needs_variant
@pytest.mark.parametrize("name", ["an_empty_problem_launches_nothing", "refuses"])
def test_edges(name):
    check.run(name)


if __name__ == "__main__":
    check.main()
