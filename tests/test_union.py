"""The launches of the union lists and of the choice without a GPU: what the C++ side packs, and how large it lays out.

What the kernels compute is tested in tests/gpu/test_prefill_union_gpu.py.
"""

import pytest
from launch_checks import LaunchChecks, error_of, needs_variant, operators

check = LaunchChecks(__file__)


def problem(tokens=20, batch=3, heads=2, pages=5, page=128, width=4, topk=16, kv="bfloat16"):
    """Positional arguments of aot_union_lists up to the lengths, contiguous."""
    import torch

    query = torch.zeros(tokens, heads * 16, 128, dtype=torch.bfloat16)
    cache = torch.zeros(pages, heads, page, 128).to(getattr(torch, kv))
    ids = torch.zeros(tokens, heads, topk, dtype=torch.int32)
    table = torch.zeros(batch, width, dtype=torch.int32)
    return [query, cache, ids, table, torch.zeros(batch + 1, dtype=torch.int32), torch.zeros(batch, dtype=torch.int32)]


def layout(tokens, batch, heads, page, width, topk):
    """(slots, capacity, offsets of tiles, counts, words, pages, choice and the end), as in launch/prefill_union.cpp."""
    slots, capacity = tokens // 8 + batch + 1, min(8 * topk, max(1, -(-width * page // 128)))
    items, offsets = slots * heads, [0]
    for size in (slots * 32, items * 4, items * capacity * 4, items * capacity * (512 // page), batch * 4):
        offsets.append(offsets[-1] + -(-size // 256) * 256)
    return slots, capacity, offsets


@check
def packs_every_parameter(driver):
    import torch

    lists = operators().aot_union_lists
    for page, causal in ((128, True), (64, False)):
        query, cache, _, _, cu, used = problem(page=page)
        ids = torch.zeros(7, 2, 20, dtype=torch.int32).permute(2, 1, 0)
        table = torch.zeros(3, 9, dtype=torch.int32)[:, :4]
        memory = lists(query, cache, ids, table, cu, used, causal, 1.5)
        slots, capacity, at = layout(20, 3, 2, page, 4, 7)
        assert (slots, capacity) == (6, 4 * page // 128) and memory.numel() == at[-1] and memory.dtype == torch.uint8
        build, choose = driver.launches
        driver.launches.clear()
        assert build.entry == "m3s_union_lists_sm90a_0" and build.grid == (1, 2, 1) and build.block == (256, 1, 1)
        base = memory.data_ptr()
        want = [t.data_ptr() for t in (ids, table, cu, used)] + [base + x for x in at[:4]]
        want += [s * 4 for s in ids.stride()] + [9 * 4]
        want += [20, 3, 7, 4, 5, 7 if page == 128 else 6, 4 * page, int(causal), slots, capacity, 0]
        assert build.params == want
        assert choose.entry == "m3s_union_choice_sm90a_0" and choose.grid == (3, 1, 1)
        assert choose.params == [cu.data_ptr(), base + at[1], base + at[4], 3, slots, 2, 1.5]
        assert driver.last_overlap == 1


@check
def a_wide_table_keeps_lists_as_long_as_a_tile_can_choose(driver):
    lists = operators().aot_union_lists
    for width, topk, capacity in (
        (1, 16, 1),
        (127, 16, 127),
        (128, 16, 128),
        (5000, 16, 128),
        (5000, 32, 256),
        (9, 4, 9),
    ):
        lists(*problem(width=width, topk=topk), True, 2.0)
        assert driver.launches[-2].params[-2] == capacity, (width, topk)


@check
def refuses_what_the_lists_cannot_hold(driver):
    import torch

    lists = operators().aot_union_lists
    query, *rest = problem()
    assert "16 query heads" in error_of(lists, query[:, :16], *rest, True, 2.0)
    assert "65,535 blocks" in error_of(lists, *problem(width=65536), True, 2.0)
    lists(*problem(width=65535), True, 2.0)
    driver.launches.clear()
    assert "block_indices: expected int32" in error_of(lists, *problem(topk=33), True, 2.0)
    assert "at least one sequence" in error_of(lists, *problem(batch=0), True, 2.0)
    query, cache, *rest = problem()
    flat = cache[:, :1].expand(-1, 2, -1, -1)
    assert "strides of the caches" in error_of(lists, query, flat, *rest, True, 2.0)
    many = torch.zeros(1, 2, 16, dtype=torch.int32).expand(1 << 23, -1, -1)
    query = torch.zeros(1, 32, 128, dtype=torch.bfloat16).expand(1 << 23, -1, -1)
    assert "strides of q" in error_of(lists, query, cache, many, *rest[1:], True, 2.0)
    assert not driver.launches


@needs_variant
@pytest.mark.parametrize("name", check.functions)
def test_launch(name):
    check.run(name)


if __name__ == "__main__":
    check.main()
