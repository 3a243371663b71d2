"""store_kv's launches without a GPU: what the C++ side packs and what it refuses.

Each check runs in a process of its own (`python tests/test_store.py NAME`), where recording_driver.c is the CUDA
driver. What the kernel writes is tested in tests/gpu/test_store_gpu.py.
"""

import pytest
from launch_checks import LaunchChecks, error_of, needs_variant, operators

check = LaunchChecks(__file__)


def problem(source="bfloat16", kept="bfloat16", index_source="bfloat16", index_kept="bfloat16", tokens=33, heads=4):
    """Tensors of which no two strides are alike."""
    import torch

    dtype = lambda name: getattr(torch, name)
    k = torch.zeros(heads, tokens, 128).to(dtype(source)).transpose(0, 1)
    v = torch.zeros(tokens, heads, 256).to(dtype(source))[..., :128]
    k_cache = torch.zeros(5, heads, 64, 128).to(dtype(kept))
    v_cache = torch.zeros(5, 64, heads, 256).to(dtype(kept)).transpose(1, 2)[..., 128:]
    index_k = torch.zeros(tokens, 384).to(dtype(index_source))[:, :128]
    index_cache = torch.zeros(7, 96, 128).to(dtype(index_kept))
    return [k, v, index_k, k_cache, v_cache, index_cache, torch.zeros(tokens, dtype=torch.int64), None, None]


@check
def packs_every_parameter(driver):
    import torch

    store = operators().aot_store_kv
    cases = {
        "copy": ("bfloat16", "bfloat16", "bfloat16", "bfloat16"),
        "bf16_e4m3": ("bfloat16", "float8_e4m3fn", "bfloat16", "float8_e4m3fn"),
        "bf16_e5m2": ("bfloat16", "float8_e5m2", "float32", "float32"),
        "f16_e4m3": ("float16", "float16", "float16", "float8_e4m3fn"),
        "f16_e5m2": ("float16", "float8_e5m2", "float8_e4m3fn", "float8_e4m3fn"),
        "f32_e4m3": ("float32", "float8_e4m3fn", "bfloat16", "bfloat16"),
        "f32_e5m2": ("float32", "float8_e5m2", "float32", "float8_e5m2"),
    }
    for program, dtypes in cases.items():
        arguments = problem(*dtypes)
        arguments[7:] = torch.ones(4), torch.ones(1)
        assert store(*arguments) is None
        launch = driver.launches.pop()
        assert launch.entry == f"m3s_store_{program}_sm90a_0"
        assert (launch.grid, launch.block, launch.shared_bytes) == ((3, 9, 1), (128, 1, 1), 0)
        k, v, index_k, k_cache, v_cache, index_cache, slots, k_scale, v_scale = arguments
        size = lambda x: x.element_size()
        strides = [x.stride(i) * size(x) for x in (k, v) for i in range(2)] + [index_k.stride(0) * size(index_k)]
        strides += [x.stride(i) * size(x) for x in (k_cache, v_cache) for i in range(3)]
        strides += [index_cache.stride(i) * size(index_cache) for i in range(2)]
        convert = [int(a.dtype != b.dtype) for a, b in ((k, k_cache), (index_k, index_cache))]
        numbers = [4, 0, 33, 4, 8, 64, 5 * 64, 96, 7 * 96, size(k), size(index_k), *convert]
        assert launch.params == [x.data_ptr() for x in arguments] + strides + numbers
    assert not driver.launches


@check
def takes_slots_of_32_bits_and_no_index(driver):
    import torch

    store = operators().aot_store_kv
    arguments = problem(tokens=16)
    arguments[2] = arguments[5] = None
    arguments[6] = arguments[6].to(torch.int32)
    store(*arguments)
    launch = driver.launches.pop()
    assert launch.grid == (1, 8, 1)
    assert launch.params[2] == launch.params[5] == 0
    assert launch.params[26] == 4


@check
def an_empty_problem_launches_nothing(driver):
    store = operators().aot_store_kv
    store(*problem(tokens=0))
    assert not driver.launches


@check
def refuses_what_would_leave_a_tensor(driver):
    import torch

    store = operators().aot_store_kv
    half, e4m3, e5m2 = torch.float16, torch.float8_e4m3fn, torch.float8_e5m2
    bad = [
        ({0: lambda x: x[:, :3]}, "v: expected the shape of k"),
        ({0: lambda x: x[..., :64], 1: lambda x: x[..., :64]}, "k: expected [T, Hkv, 128]"),
        ({3: lambda x: x[:, :3]}, "k_cache: expected [P, Hkv, page, 128]"),
        ({4: lambda x: x[:4]}, "v_cache: expected the shape of k_cache"),
        ({3: lambda x: x.to(half)}, "expected one dtype"),
        ({3: lambda x: x.to(half), 4: lambda x: x.to(half)}, "expected one dtype"),
        ({6: lambda x: x[:-1]}, "slot_mapping: expected int64 or int32 [T]"),
        ({6: lambda x: x.float()}, "slot_mapping: expected int64 or int32 [T]"),
        ({2: lambda x: None}, "expected both or neither"),
        ({2: lambda x: x[:-1]}, "index_k: expected [T, 128]"),
        ({5: lambda x: x[0]}, "index_k_cache: expected [P, page, 128]"),
        ({5: lambda x: x.to(half)}, "index_k, index_k_cache: expected one dtype"),
        (
            {3: lambda x: x.to(e4m3), 4: lambda x: x.to(e4m3), 5: lambda x: x.to(e5m2)},
            "the conversion of k and k_cache",
        ),
        ({7: lambda x: torch.ones(3)}, "k_scale: expected float32, contiguous, with 1 or Hkv elements"),
        ({8: lambda x: torch.ones(4).double()}, "v_scale: expected float32, contiguous, with 1 or Hkv elements"),
        ({0: lambda x: torch.zeros(33, 4, 130).bfloat16()[..., :128]}, "multiples of 16 bytes"),
        ({3: lambda x: torch.zeros(5, 4, 64, 256).bfloat16()[..., ::2]}, "contiguous last dimension"),
        ({5: lambda x: torch.zeros(7 * 96 * 128 + 1).bfloat16()[1:].view(7, 96, 128)}, "multiples of 16 bytes"),
    ]
    for changes, message in bad:
        arguments = problem()
        for i, change in changes.items():
            arguments[i] = change(arguments[i])
        text = error_of(store, *arguments)
        assert message in text, (message, text)
    assert not driver.launches


@needs_variant
@pytest.mark.parametrize("name", check.functions)
def test_launch(name):
    check.run(name)


if __name__ == "__main__":
    check.main()
