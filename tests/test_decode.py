"""The decode kernel's launches without a GPU: what the C++ side packs, checked against the manifest and the tensors.

Each check runs in a process of its own (`python tests/test_decode.py NAME`), where recording_driver.c is the CUDA
driver. What the kernel computes is tested in tests/gpu/test_decode_gpu.py.
"""

import pytest
from launch_checks import LaunchChecks, error_of, needs_variant, operators
from launch_checks import attention_problem as problem

check = LaunchChecks(__file__)
MULTIPROCESSORS = 132  # of the recorded device


def decode_splits(rows, width, multiprocessors=MULTIPROCESSORS):
    """The choice of torch-ext/launch/decode.cpp."""
    if 18 * rows <= multiprocessors and width <= 16:
        return 16
    if 6 * rows <= multiprocessors:
        return 4
    return 2 if 2 * rows <= multiprocessors else 1


def program(kv, splits, arch="sm90a"):
    return f"m3s_decode_{kv}_s{splits}_{arch}_0"


def check_map(tensor_map, cache, splits):
    """Boxes of 32 tokens, rows of 128 bytes, swizzled by 128 bytes, L2 promotion of 128; none for other programs."""
    if splits == 4:
        assert tensor_map.base == 0 and tensor_map.extents == ()
        return
    size = cache.element_size()
    page, head, token = (s * size for s in cache.stride()[:3])
    pages, heads, tokens, _ = cache.shape
    assert tensor_map.base == cache.data_ptr() and tensor_map.swizzle == 3 and tensor_map.promotion == 2
    if size == 1:
        assert tensor_map.type == 0 and tensor_map.box == (128, 32, 1, 1)
        assert tensor_map.extents == (128, tokens, heads, pages) and tensor_map.strides == (token, head, page)
    else:
        assert tensor_map.type == 9 and tensor_map.box == (64, 32, 2, 1, 1)
        assert tensor_map.extents == (64, tokens, 2, heads, pages) and tensor_map.strides == (token, 128, head, page)


@check
def copies_by_address_where_no_tensor_map_fits(driver):
    attend = operators().aot_sparse_attention
    arguments = problem(pages=2)
    arguments[4] = arguments[4].as_strided((2, 2, 128, 128), (0, 128 * 128, 128, 1))
    for splits in (1, 2, 16):
        attend(*arguments, splits)
        launch = driver.launches.pop()
        assert launch.entry == program("bf16", 4) and launch.params[0].base == 0
    arguments = problem()
    arguments[3], arguments[4] = arguments[3][:0], arguments[4][:0]
    attend(*arguments, 1)
    assert driver.launches.pop().entry == program("bf16", 4)


def apart(packed):
    """The same shape with other strides: tokens before heads, and room behind every page."""
    import torch

    pages, heads, page, width = packed.shape
    return torch.zeros(pages, page + 1, heads, width, dtype=packed.dtype)[:, :page].transpose(1, 2)


@check
def packs_every_parameter(driver):
    import torch

    attend = operators().aot_sparse_attention
    short = {"bfloat16": "bf16", "float16": "f16", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
    pairs = [(q, kv) for q in ("bfloat16", "float16") for kv in (q, "float8_e4m3fn", "float8_e5m2")]
    for (q, kv), splits in [(pair, s) for pair in pairs for s in (1, 2, 4, 16)]:
        qt, kt = getattr(torch, q), getattr(torch, kv)
        size = kt.itemsize
        wide = torch.zeros(3, 34, 160, dtype=qt)
        query = wide[:, 1:33, 16:144]
        out = torch.zeros(32, 3, 128, dtype=qt).transpose(0, 1)
        packed = torch.zeros(5, 2, 128, 256, dtype=torch.float32).to(kt)
        k_cache, v_cache = packed[..., :128], apart(packed)[..., 128:]
        ids = torch.zeros(7, 2, 3, dtype=torch.int32).permute(2, 1, 0)
        table = torch.zeros(2, 9, dtype=torch.int32)[:, :4]
        cu, used = torch.zeros(3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
        lse = torch.zeros(3, 40)[:, :32]
        k_scale, v_scale = torch.ones(2), torch.ones(1)
        attend(out, lse, query, k_cache, v_cache, ids, table, cu, used, 0.25, splits != 4, k_scale, v_scale, splits)
        launch = driver.launches.pop()
        assert launch.entry == program(short[kv], splits)
        assert launch.grid == (3 * splits, 2, 1) and launch.block == (256 if splits == 2 else 128, 1, 1)
        assert driver.last_cluster == splits and driver.last_overlap == 1
        assert launch.shared_bytes == driver.manifests[launch.entry]["dynamic_smem"]
        tensors = (query, k_cache, v_cache, ids, table, cu, used, out, lse, k_scale, v_scale)
        strides = [s * 2 for s in query.stride()[:2]]
        strides += [s * size for cache in (k_cache, v_cache) for s in cache.stride()[:3]]
        strides += [s * 4 for s in ids.stride()] + [table.stride(0) * 4]
        strides += [s * 2 for s in out.stride()[:2]] + [s * 4 for s in lse.stride()] + [4, 0]
        numbers = [3, 2, 7, 4, 5, 7, 512, 16, int(splits != 4), int(q == "bfloat16"), 0.25]
        want = [t.data_ptr() for t in tensors] + strides + numbers
        assert launch.params[2:-1] == want
        for tensor_map, cache in zip(launch.params[:2], (k_cache, v_cache)):
            check_map(tensor_map, cache, splits)
        assert abs(launch.params[-1] - 2 / 3) < 1e-6
    assert not driver.launches


@check
def absent_outputs_and_scales_are_null(driver):
    attend = operators().aot_sparse_attention
    arguments = problem(page=64)
    arguments[1] = None
    attend(*arguments)
    params = driver.launches.pop().params
    assert params[10] == params[11] == params[12] == 0 and params[27:31] == [0, 0, 0, 0]
    assert params[36] == 6 and params[37] == 4 * 64


@check
def strides_beyond_32_bits_survive(driver):
    attend = operators().aot_sparse_attention
    arguments = problem(pages=1)
    arguments[3] = arguments[3].as_strided((1, 2, 128, 128), (2**40, 128 * 128, 128, 1))
    attend(*arguments)
    assert driver.launches.pop().params[15] == 2**41


@check
def chooses_the_splits_by_shape(driver):
    attend = operators().aot_sparse_attention
    for tokens, requests, heads, topk in (
        (1, 1, (64, 4), 16), (6, 6, (64, 4), 16), (7, 7, (64, 4), 16), (132, 132, (64, 4), 16), (133, 133, (64, 4), 16),
        (1, 1, (64, 4), 32), (1, 1, (1, 1), 4), (24, 24, (8, 1), 8), (25, 25, (8, 1), 16), (528, 528, (16, 1), 16),
        (529, 529, (16, 1), 16), (8, 1, (64, 4), 16), (64, 16, (64, 4), 16), (66, 33, (4, 2), 32), (65, 33, (4, 2), 32),
    ):  # fmt: skip
        attend(*problem(tokens=tokens, batch=requests, heads=heads, topk=topk))
        want = decode_splits(tokens * heads[1], topk)
        launch = driver.launches.pop()
        assert launch.entry == program("bf16", want), (tokens, requests, heads, topk)
        assert launch.grid == (tokens * want, heads[1], 1)
    for rows in (1, 7, 8, 22, 23, 66, 67, 5000):
        attend(*problem(kv="float8_e4m3fn", tokens=rows, batch=rows, heads=(16, 1)))
        assert driver.launches.pop().entry == program("e4m3", decode_splits(rows, 16))
    assert [decode_splits(n, 16) for n in (1, 7, 8, 22, 23, 66, 67)] == [16, 16, 4, 4, 2, 2, 1]
    assert [decode_splits(n, 17) for n in (1, 22, 23)] == [4, 4, 2]


@check
def measures_without_overlap(driver):
    operators().aot_sparse_attention(*problem(), 4, False)
    assert driver.last_cluster == 4 and driver.last_overlap == 0
    operators().aot_sparse_attention(*problem(), 1)
    assert driver.last_cluster == 1 and driver.last_overlap == 1


@check
def an_empty_problem_launches_nothing(driver):
    import torch

    attend = operators().aot_sparse_attention
    attend(*problem(tokens=0))
    # No request: every row lies past the last one.
    arguments = problem(batch=0)
    arguments[0].fill_(float("nan"))
    attend(*arguments)
    assert not arguments[0].any() and bool((arguments[1] == -torch.inf).all())
    assert not driver.launches


@check
def picks_the_image_of_the_capability(driver):
    driver.set_capability(103)
    operators().aot_sparse_attention(*problem(kv="float8_e4m3fn"), 16)
    assert driver.launches.pop().entry == "m3s_decode_e4m3_s16_sm103a_0"


@check
def refuses_what_would_leave_a_tensor(driver):
    import torch

    attend = operators().aot_sparse_attention
    names = [
        "out",
        "lse",
        "q",
        "k_cache",
        "v_cache",
        "ids",
        "table",
        "cu",
        "used",
        "softmax_scale",
        "causal",
        "k_scale",
        "v_scale",
    ]

    def refused(message, **changes):
        arguments = problem()
        for name, change in changes.items():
            arguments[names.index(name)] = change(arguments[names.index(name)]) if callable(change) else change
        text = error_of(attend, *arguments)
        assert message in text, (message, text)

    narrow = torch.zeros(3, 32, 130, dtype=torch.bfloat16)
    refused("q: expected [T, Hq, 128]", q=lambda x: x[0])
    refused("q: expected 1 to 16 query heads", q=lambda x: x[:, :31], out=lambda x: x[:, :31])
    refused("q: expected 1 to 16 query heads", q=lambda x: x.repeat(1, 2, 1), out=lambda x: x.repeat(1, 2, 1))
    refused("out: expected shape and dtype of q", out=lambda x: x[:2])
    refused("out: expected shape and dtype of q", out=lambda x: x.half())
    refused("lse: expected float32 [T, Hq]", lse=lambda x: x[:, :5])
    refused("lse: expected float32 [T, Hq]", lse=lambda x: x.double())
    refused("k_cache: expected [P, Hkv, 64 or 128, 128]", k_cache=lambda x: x[:, :, :32])
    refused("v_cache: expected shape and dtype of k_cache", v_cache=lambda x: x[:4])
    refused("v_cache: expected shape and dtype of k_cache", v_cache=lambda x: x.half())
    refused("block_indices: expected int32 [T, Hkv, K <= 32]", ids=lambda x: x[:, :1])
    refused("block_indices: expected int32 [T, Hkv, K <= 32]", ids=lambda x: x.long())
    refused("block_indices: expected int32 [T, Hkv, K <= 32]", ids=lambda x: x.repeat(1, 1, 3))
    refused("cu_seqlens_q: expected contiguous int32 [B + 1]", cu=lambda x: x[:2])
    refused("seqused_k: expected contiguous int32 [B]", used=lambda x: x.long())
    refused("block_table: expected int32 [B, M]", table=lambda x: x[:1])
    refused("block_table: expected int32 [B, M]", table=lambda x: x.t().contiguous().t())
    refused("q, k_cache: expected bfloat16 or float16 q", k_cache=lambda x: x.half(), v_cache=lambda x: x.half())
    refused("k_scale: expected float32, contiguous, with 1 or Hkv", k_scale=torch.ones(3))
    refused("v_scale: expected float32, contiguous, with 1 or Hkv", v_scale=torch.ones(1, dtype=torch.float64))
    refused("q, out: expected 16-byte aligned", q=narrow[..., :128])
    refused("q, out: expected 16-byte aligned", out=narrow[..., 1:129])
    shifted = torch.zeros(5 * 2 * 128 * 128 + 1, dtype=torch.bfloat16)[1:].view(5, 2, 128, 128)
    refused("k_cache, v_cache: expected 16-byte aligned", v_cache=shifted)
    assert "splits: expected 0" in error_of(attend, *problem(topk=32), 16)
    assert "splits: expected 0" in error_of(attend, *problem(), 8)
    assert not driver.launches


@needs_variant
@pytest.mark.parametrize("name", check.functions)
def test_launch(name):
    check.run(name)


if __name__ == "__main__":
    check.main()
