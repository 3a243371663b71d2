"""The launches of select_blocks and block_scores for many rows a request, without a GPU: which kernels are taken, what
the C++ side packs, tensor maps included, what it refuses.

Each check runs in a process of its own (`python tests/test_prefill_score.py NAME`), where recording_driver.c is the CUDA
driver. What the kernels compute is tested in tests/gpu/test_prefill_score_gpu.py.
"""

import pytest
from launch_checks import LaunchChecks, error_of, needs_variant, operators

check = LaunchChecks(__file__)
SHORT = {"bfloat16": "bf16", "float16": "f16", "float8_e4m3fn": "e4m3"}
BYTES, HALVES = 0, 9  # CU_TENSOR_MAP_DATA_TYPE_UINT8 and _BFLOAT16: boxes are copied, not converted
PAIRS = [
    ("bfloat16", "bfloat16"),
    ("float16", "float16"),
    ("bfloat16", "float8_e4m3fn"),
    ("float16", "float8_e4m3fn"),
    ("float8_e4m3fn", "float8_e4m3fn"),
]
SWIZZLE_128 = 3
DECODE, STORED, FUSED = 1, 2, 3  # of `way`


def problem(tokens, requests, heads=4, page=128, width=20, dtypes=PAIRS[0], pages=9):
    import torch

    query = torch.zeros(heads, tokens, 160).to(getattr(torch, dtypes[0])).transpose(0, 1)[..., :128]
    keys = torch.zeros(pages, page + 3, 160).to(getattr(torch, dtypes[1]))[:, :page, :128]
    table = torch.zeros(requests, width + 5, dtype=torch.int32)[:, :width]
    return [query, keys, table, torch.zeros(requests + 1, dtype=torch.int32), torch.zeros(requests, dtype=torch.int32)]


def ids(tokens, heads=4, topk=16):
    import torch

    return torch.zeros(tokens, heads, topk, dtype=torch.int32)


def kernels(driver):
    names = [launch.entry.removeprefix("m3s_").removesuffix("_sm90a_0") for launch in driver.launches]
    driver.launches.clear()
    return names


@check
def packs_every_parameter(driver):
    import torch

    ops = operators()
    for query_dtype, key_dtype in PAIRS:
        for page in (64, 128):
            for topk, variant, rows in ((16, "top16", 256), (32, "top32", 128), (17, "top32", 128)):
                tensors = problem(300, 2, 2, page, dtypes=(query_dtype, key_dtype))
                query, keys, table = tensors[:3]
                out = torch.zeros(2, 300, 2 * topk, dtype=torch.int32).transpose(0, 1)[..., ::2]
                ops.aot_select_blocks(out, None, *tensors, 2, 1, FUSED)
                score, fold = driver.launches
                driver.launches.clear()
                assert score.entry == f"m3s_prefill_score_{SHORT[query_dtype]}_{SHORT[key_dtype]}_{variant}_sm90a_0"
                assert score.grid == (132, 1, 1) and score.block == (384, 1, 1)
                assert fold.entry == f"m3s_prefill_fold_{variant}_sm90a_0"
                assert fold.grid == (132, rows // 128, 1) and fold.block == (128, 1, 1)
                map_q, map_k, *rest = score.params
                kind = {1: BYTES, 2: HALVES}
                size = query.element_size()
                assert (map_q.base, map_q.type, map_q.swizzle) == (query.data_ptr(), kind[size], SWIZZLE_128)
                assert map_q.extents == (128, 2, 300)
                assert map_q.strides == (query.stride(1) * size, query.stride(0) * size)
                assert map_q.box == (128 // size, 2, rows // 2)
                size = keys.element_size()
                assert (map_k.base, map_k.type, map_k.swizzle) == (keys.data_ptr(), kind[size], SWIZZLE_128)
                assert map_k.extents == (128, page, 9)
                assert map_k.strides == (keys.stride(1) * size, keys.stride(0) * size)
                assert map_k.box == (128 // size, 64, 1)
                parts = rest[1]
                assert parts != 0
                strides = [out.stride(i) * 4 for i in range(3)]
                data = [x.data_ptr() for x in tensors[2:]]
                numbers = [300, 2, 1, 9, 20, 6 if page == 64 else 7, topk, 2, 1, 0]
                assert rest == [out.data_ptr(), parts, *data, *strides, table.stride(0) * 4, *numbers]
                numbers = [300, 2, 1, 20 * page, topk, 2, 1, 0]
                assert fold.params == [out.data_ptr(), parts, *data[1:], *strides, *numbers]
                assert driver.last_overlap == 1


@check
def ids_go_as_vectors_where_they_can(driver):
    import torch

    ops = operators()
    tensors = problem(100, 1)
    cases = [(ids(100), 1), (ids(100, topk=8), 1), (ids(100, topk=6), 0), (ids(100, topk=17)[..., :16], 0)]
    cases += [(torch.zeros(100 * 64 + 1, dtype=torch.int32)[1:].view(100, 4, 16), 0)]
    cases += [(torch.zeros(4, 100, 16, dtype=torch.int32).transpose(0, 1), 1)]
    for out, vectors in cases:
        ops.aot_select_blocks(out, None, *tensors, 1, 0, FUSED)
        assert [launch.params[-1] for launch in driver.launches] == [vectors, vectors], out.stride()
        driver.launches.clear()


@check
def scores_are_stored_for_the_caller_and_for_few_tiles(driver):
    import torch

    ops = operators()
    tensors = problem(300, 1)
    scores = torch.full((300, 4, 23), 7.0)[..., :20]
    ops.aot_select_blocks(ids(300), scores, *tensors, 1, 0)
    score, topk = driver.launches
    driver.launches.clear()
    assert score.entry == "m3s_prefill_score_bf16_bf16_scores_sm90a_0" and score.grid == (132, 1, 1)
    assert score.params[2] == topk.params[1] == scores.data_ptr()
    assert score.params[7:10] == [scores.stride(0) * 4, scores.stride(1) * 4, 4]
    assert (scores == -torch.inf).all()  # what is no candidate stays so
    ops.aot_block_scores(scores.fill_(7), *tensors)
    assert kernels(driver) == ["prefill_score_bf16_bf16_scores"] and (scores == -torch.inf).all()
    ops.aot_select_blocks(ids(300), None, *tensors, 1, 0)
    score, topk = driver.launches
    assert score.params[2] == topk.params[1] != 0


@check
def chooses_by_shape(driver):
    """132 multiprocessors. (tokens, requests, heads, blocks, fp8 queries) -> kernels."""
    ops = operators()
    decode, stored, fused = "decode_s", "_scores", "fold"
    cases = {
        (16, 1, 4, 256, False): decode,
        (17, 1, 4, 256, False): stored,
        (64, 1, 1, 256, False): decode,
        (65, 1, 1, 256, False): stored,
        (8 * 20, 20, 4, 256, False): decode,
        (8 * 20 + 1, 20, 4, 256, False): stored,
        (32, 1, 4, 64, False): decode,
        (33, 1, 4, 64, False): stored,
        (8, 1, 4, 1024, False): decode,
        (9, 1, 4, 1024, False): stored,
        (1, 1, 4, 256, True): stored,
        (512, 1, 4, 512, False): stored,
        (2112, 1, 4, 1024, False): stored,  # 33 tiles: a quarter of the multiprocessors
        (2113, 1, 4, 1024, False): fused,
        (2048, 1, 4, 2048, False): stored,  # 64 MiB of scores
        (2049, 1, 4, 2048, False): fused,
        (8192, 1, 4, 64, False): fused,
        (300, 1, 3, 64, False): decode,  # heads of no power of two
        (8192, 1, 64, 64, False): fused,
        (300, 1, 128, 64, False): decode,
    }
    for case, expected in cases.items():
        tokens, requests, heads, blocks, fp8 = case
        tensors = problem(tokens, requests, heads, 128, blocks, PAIRS[4 if fp8 else 0], pages=1)
        ops.aot_select_blocks(ids(tokens, heads), None, *tensors, 1, 0)
        names = kernels(driver)
        assert any(expected in name for name in names), (case, names)
    query, keys, *rest = problem(300, 1)
    ops.aot_select_blocks(ids(300), None, query, keys[:1].expand(9, -1, -1), *rest, 1, 0)
    assert "decode_s" in kernels(driver)[0]  # a stride of 0 has no tensor map


@check
def blackwell_takes_the_same_arguments(driver):
    ops, want = operators(), {}
    for capability, arch, ctas in ((90, "sm90a", 132), (100, "sm100a", 148), (103, "sm103a", 148)):
        driver.set_capability(capability)
        for pair, topk in ((PAIRS[0], 16), (PAIRS[4], 32)):
            ops.aot_select_blocks(ids(9000, topk=topk), None, *problem(9000, 1, dtypes=pair), 1, 0, FUSED)
            score, fold = driver.launches
            driver.launches.clear()
            name = f"{'bf16_bf16' if pair == PAIRS[0] else 'e4m3_e4m3'}_top{topk}"
            assert score.entry == f"m3s_prefill_score_{name}_{arch}_0" and score.grid == (ctas, 1, 1)
            assert fold.entry == f"m3s_prefill_fold_top{topk}_{arch}_0"
            assert score.shared_bytes == driver.manifests[score.entry]["dynamic_smem"] <= 227 << 10
            # All but the tensor maps and addresses.
            found = score.params[7:], fold.params[4:]
            assert found == want.setdefault(pair, found)


@check
def a_device_without_these_kernels(driver):
    driver.set_capability(89)
    text = error_of(operators().aot_select_blocks, ids(300), None, *problem(300, 1, dtypes=PAIRS[4]), 1, 0)
    assert "index_q: float8_e4m3fn is taken with a power of two of heads" in text


@check
def degenerate_problems(driver):
    ops = operators()
    ops.aot_select_blocks(ids(0), None, *problem(0, 2), 1, 0)
    assert not driver.launches
    for tensors in (problem(100, 0), problem(100, 1, width=0), problem(100, 1, pages=0)):
        for way in (STORED, FUSED):
            ops.aot_select_blocks(ids(100), None, *tensors, 1, 0, way)
            assert kernels(driver)[-1] in ("topk_narrow", "prefill_fold_top16")


@check
def refuses(driver):
    import torch

    ops = operators()
    bad = [
        ((problem(300, 1, 3), STORED), "prefill_score does not take these tensors"),
        ((problem(300, 1), 4), "way: expected 0"),
        ((problem(300, 1, dtypes=PAIRS[4]), DECODE), "index_q: float8_e4m3fn is taken"),
        ((problem(300, 1, dtypes=("float8_e4m3fn", "bfloat16")), 0), "or both float8_e4m3fn"),
    ]
    for (tensors, way), message in bad:
        text = error_of(ops.aot_select_blocks, ids(300, tensors[0].shape[1]), None, *tensors, 1, 0, way)
        assert message in text, (message, text)
    scores = torch.zeros(300, 4, 20)
    text = error_of(ops.aot_select_blocks, ids(300), scores, *problem(300, 1), 1, 0, FUSED)
    assert "fused, no scores" in text
    assert not driver.launches


@needs_variant
@pytest.mark.parametrize("name", check.functions)
def test_launch(name):
    check.run(name)


if __name__ == "__main__":
    check.main()
