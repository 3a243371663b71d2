"""The launches of block_scores and select_blocks without a GPU: what the C++ side packs, how it lays work out, what it
refuses.

Each check runs in a process of its own (`python tests/test_select.py NAME`), where recording_driver.c is the CUDA
driver. What the kernels compute is tested in tests/gpu/test_select_gpu.py.
"""

import pytest
from launch_checks import LaunchChecks, error_of, needs_variant, operators

check = LaunchChecks(__file__)
SHORT = {"bfloat16": "bf16", "float16": "f16", "float8_e4m3fn": "e4m3"}


def problem(tokens=3, requests=3, heads=4, page=128, width=20, dtypes=("bfloat16", "bfloat16"), pages=9):
    import torch

    query = torch.zeros(heads, tokens, 136).to(getattr(torch, dtypes[0])).transpose(0, 1)[..., :128]
    keys = torch.zeros(pages, page + 3, 128).to(getattr(torch, dtypes[1]))[:, :page]
    table = torch.zeros(requests, width + 5, dtype=torch.int32)[:, :width]
    return [query, keys, table, torch.zeros(requests + 1, dtype=torch.int32), torch.zeros(requests, dtype=torch.int32)]


@check
def packs_every_parameter(driver):
    import torch

    ops = operators()
    for query_dtype in ("bfloat16", "float16"):
        for key_dtype in (query_dtype, "float8_e4m3fn"):
            for page in (64, 128):
                tensors = problem(5, 2, 3, page, dtypes=(query_dtype, key_dtype))
                query, keys, table = tensors[:3]
                blocks = 20 * page // 128
                scores = torch.zeros(5, 3, blocks + 2)[..., :blocks]
                out = torch.zeros(3, 5, 34, dtype=torch.int32).transpose(0, 1)[..., ::2]
                ops.aot_select_blocks(out, scores, *tensors, 2, 1)
                score, topk = driver.launches
                driver.launches.clear()
                assert score.entry == f"m3s_decode_score_{SHORT[query_dtype]}_{SHORT[key_dtype]}_n16_sm90a_0"
                assert score.grid[1:] == (3, 1) and score.block == (128, 1, 1)  # two requests and the rows of none
                strides = [scores.stride(0) * 4, scores.stride(1) * 4, query.stride(0) * 2, query.stride(1) * 2]
                size = keys.element_size()
                strides += [keys.stride(0) * size, keys.stride(1) * size, table.stride(0) * 4]
                numbers = [5, 2, 3, 9, 20, 6 if page == 64 else 7, blocks, 1, 1]
                assert score.params == [x.data_ptr() for x in (scores, *tensors)] + strides + numbers
                assert topk.entry == "m3s_topk_narrow_sm90a_0"
                assert topk.grid == (15, 1, 1) and topk.block == (128, 1, 1)
                strides = [x.stride(i) * 4 for x in (out,) for i in range(3)] + [
                    scores.stride(0) * 4,
                    scores.stride(1) * 4,
                ]
                numbers = [5, 2, 3, blocks, 20 * page, 17, 2, 1]
                assert topk.params == [x.data_ptr() for x in (out, scores, *tensors[3:])] + strides + numbers


@check
def scores_go_to_a_workspace_unless_asked_for(driver):
    import torch

    ops = operators()
    tensors = problem()
    out = torch.zeros(3, 4, 16, dtype=torch.int32)
    ops.aot_select_blocks(out, None, *tensors, 1, 0)
    score, topk = driver.launches
    assert score.params[0] == topk.params[1] != 0
    assert score.grid[1] == 3 and score.params[-1] == 0  # no row beyond the requests, nothing filled
    driver.launches.clear()
    scores = torch.zeros(3, 4, 20)
    ops.aot_block_scores(scores, *tensors)
    [score] = driver.launches
    assert score.params[0] == scores.data_ptr() and score.grid[1] == 4 and score.params[-1] == 1


@check
def lays_the_work_out_by_shape(driver):
    """132 multiprocessors. (tokens, requests, heads, blocks, fp8) -> columns, splits, column groups, top-k shape,
    whether keys are fetched ahead, carveout."""
    import torch

    ops = operators()
    cases = {
        (1, 1, 4, 64, False): (8, 64, 1, "narrow", 1, 100),
        (1, 1, 4, 256, False): (8, 256, 1, "narrow", 1, 100),
        (1, 1, 4, 256, True): (8, 256, 1, "narrow", 1, 100),
        (1, 1, 4, 1024, False): (8, 512, 1, "wide", 0, 8),
        (1, 1, 4, 1024, True): (8, 512, 1, "wide", 0, 100),
        (4, 4, 4, 256, False): (8, 128, 1, "narrow", 0, 8),
        (16, 16, 4, 256, False): (8, 128, 1, "narrow", 0, 8),
        (16, 16, 4, 256, True): (8, 64, 1, "narrow", 0, 8),
        (64, 64, 4, 1024, False): (8, 64, 1, "wide", 0, 8),
        (256, 256, 4, 256, False): (8, 16, 1, "narrow", 0, 8),
        (1025, 1025, 4, 20, False): (8, 5, 1, "narrow", 0, 8),
        (64, 16, 4, 256, False): (16, 24, 1, "narrow", 1, 8),
        (64, 16, 4, 256, True): (16, 24, 1, "narrow", 1, 8),
        (128, 16, 4, 256, False): (32, 16, 1, "narrow", 1, 8),
        (256, 16, 4, 256, False): (32, 16, 2, "narrow", 0, 8),
        (8, 1, 1, 4096, False): (8, 2048, 1, "long", 0, 8),
        (8, 1, 4, 256, False): (32, 256, 1, "narrow", 1, 100),
        (64, 64, 4, 64, False): (8, 32, 1, "narrow", 0, 8),
        (2, 2, 4, 256, False): (8, 256, 1, "narrow", 1, 8),
    }
    for (tokens, requests, heads, blocks, fp8), (columns, splits, groups, shape, ahead, carveout) in cases.items():
        dtypes = ("bfloat16", "float8_e4m3fn" if fp8 else "bfloat16")
        tensors = problem(tokens, requests, heads, 128, blocks, dtypes, pages=1)
        # 1: by decode_score, although some shapes would go to prefill_score.
        ops.aot_select_blocks(torch.zeros(tokens, heads, 16, dtype=torch.int32), None, *tensors, 1, 0, 1)
        score, topk = driver.launches
        driver.launches.clear()
        case = (tokens, requests, heads, blocks, fp8)
        assert f"_n{columns}_" in score.entry, (case, score.entry)
        assert score.grid == (splits, requests, groups), (case, score.grid)
        assert f"topk_{shape}_" in topk.entry, (case, topk.entry)
        assert topk.grid == (tokens * heads, 1, 1)
        assert score.params[-2:] == [ahead, 0], case
        # Top-k starts beside the scoring, which only one carveout for both allows.
        assert (score.overlap, score.carveout) == (topk.overlap, topk.carveout) == (1, carveout), case


@check
def degenerate_problems(driver):
    import torch

    ops = operators()
    out = lambda tokens: torch.zeros(tokens, 4, 16, dtype=torch.int32)
    ops.aot_select_blocks(out(0), None, *problem(0, 2), 1, 0)
    assert not driver.launches
    ops.aot_select_blocks(out(2), None, *problem(2, 0), 1, 0)  # rows of no request
    ops.aot_select_blocks(out(2), None, *problem(2, 1, width=0), 1, 0)  # no block
    assert [launch.entry.split("_")[1] for launch in driver.launches] == ["topk", "topk"]
    driver.launches.clear()
    ops.aot_block_scores(torch.zeros(2, 4, 20), *problem(2, 0))
    assert driver.launches.pop().grid[1] == 1


@check
def refuses_what_would_leave_a_tensor(driver):
    import torch

    ops = operators()
    out, scores = torch.zeros(3, 4, 16, dtype=torch.int32), torch.zeros(3, 4, 20)
    bad = [
        ({0: lambda x: x[..., :64]}, "index_q: expected [T, Hi, 128]"),
        ({1: lambda x: x[:, :32]}, "index_k_cache: expected [P, 64 or 128, 128]"),
        ({1: lambda x: x.half()}, "keys of the same dtype or float8_e4m3fn"),
        ({1: lambda x: x.to(torch.float8_e5m2)}, "keys of the same dtype or float8_e4m3fn"),
        ({2: lambda x: x.long()}, "block_table: expected int32 [B, M]"),
        ({2: lambda x: torch.zeros(3, 16385, dtype=torch.int32)}, "at most 16,384 blocks"),
        ({3: lambda x: x[:-1]}, "cu_seqlens_q: expected int32 [B + 1]"),
        ({3: lambda x: x.long()}, "cu_seqlens_q: expected int32 [B + 1]"),
        ({4: lambda x: x[:-1]}, "seqused_k: expected int32 [B]"),
        ({0: lambda x: torch.zeros(3, 4, 130).bfloat16()[..., :128]}, "multiples of 16 bytes"),
        ({1: lambda x: torch.zeros(9, 128, 129).bfloat16()[..., :128]}, "multiples of 16 bytes"),
        ({1: lambda x: torch.zeros(9, 128, 256).bfloat16()[..., ::2]}, "contiguous last dimension"),
    ]
    for changes, message in bad:
        tensors = problem()
        for i, change in changes.items():
            tensors[i] = change(tensors[i])
        for text in (
            error_of(ops.aot_select_blocks, out, None, *tensors, 1, 0),
            error_of(ops.aot_block_scores, scores, *tensors),
        ):
            assert message in text, (message, text)
    outputs = [
        ((out[:2], None, 1, 0), "out: expected int32 [T, Hi, topk]"),
        ((out.long(), None, 1, 0), "out: expected int32 [T, Hi, topk]"),
        ((torch.zeros(3, 4, 33, dtype=torch.int32), None, 1, 0), "topk of at most 32"),
        ((out, scores[..., :19], 1, 0), "scores: expected float32 [T, Hi, ceil(M * page / 128)]"),
        ((out, scores.half(), 1, 0), "scores: expected float32"),
        ((out, None, 9, 8), "local_blocks, init_blocks: expected at most topk together"),
        ((out, None, -1, 0), "local_blocks, init_blocks: expected at most topk together"),
    ]
    for (given, given_scores, local, init), message in outputs:
        text = error_of(ops.aot_select_blocks, given, given_scores, *problem(), local, init)
        assert message in text, (message, text)
    assert not driver.launches


@needs_variant
@pytest.mark.parametrize("name", check.functions)
def test_launch(name):
    check.run(name)


if __name__ == "__main__":
    check.main()
