"""The combine kernel's launches without a GPU: what the C++ side packs, checked against the manifest and the tensors.

The checks run in processes of their own (`python tests/test_combine.py NAME...`), where recording_driver.c is the CUDA
driver. What the kernel computes is tested in tests/gpu/test_combine_gpu.py.
"""

import threading

import pytest
from launch_checks import LaunchChecks, error_of, needs_variant, operators

check = LaunchChecks(__file__)


def states(n=3, t=2, h=4, dtype="float32"):
    import torch

    return torch.randn(n, t, h, 128).to(getattr(torch, dtype)), torch.randn(n, t, h)


@check
def packs_every_parameter(driver):
    import torch

    merge = operators().aot_merge_states
    for dtype, result, rows_per_cta in (
        ("float32", "float32", 4),
        ("float32", "bfloat16", 4),
        ("float32", "float16", 4),
        ("bfloat16", "bfloat16", 8),
        ("float16", "float16", 8),
    ):
        outs, lses = states(3, 5, 7, dtype)
        outs = outs.transpose(0, 2).contiguous().transpose(0, 2)  # head-major: no two strides alike
        lses = lses.transpose(1, 2).contiguous().transpose(1, 2)
        out = torch.empty(7, 6, 136, dtype=getattr(torch, result))[:, :5, :128].transpose(0, 1)
        lse = torch.empty(5, 18)[:, 2:16:2]
        assert merge(out, lse, outs, lses) is None
        launch = driver.launches.pop()
        short = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
        assert launch.entry == f"m3s_combine_{short[dtype]}_{short[result]}_sm90a_0"
        assert launch.grid == (-(-35 // rows_per_cta), 1, 1)
        assert launch.block == (128, 1, 1)
        assert launch.shared_bytes == 0
        addresses = [tensor.data_ptr() for tensor in (out, lse, outs, lses)]
        strides = [tensor.stride(i) * tensor.element_size() for tensor in (outs, lses) for i in range(3)]
        strides += [tensor.stride(i) * tensor.element_size() for tensor in (out, lse) for i in range(2)]
        assert len(set(strides)) == 10
        assert launch.params == addresses + strides + [3, 5, 7]
    assert not driver.launches


@check
def strides_beyond_32_bits_survive(driver):
    import torch

    merge = operators().aot_merge_states
    outs, lses = states(2, 2, 1)
    # One state, so its stride is never walked, but it has to arrive whole.
    wide = outs.as_strided((1, 2, 1, 128), (2**40, 128, 128, 1))
    merge(torch.empty(2, 1, 128), torch.empty(2, 1), wide, lses[:1])
    assert driver.launches.pop().params[4] == 2**42


@check
def loads_an_image_once(driver):
    import torch

    merge = operators().aot_merge_states
    arguments = (torch.empty(2, 4, 128), torch.empty(2, 4), *states())
    threads = [threading.Thread(target=merge, args=arguments) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(driver.launches) == 8
    assert driver.load_count == 1
    driver.launches.clear()


@check
def an_empty_problem_launches_nothing(driver):
    import torch

    merge = operators().aot_merge_states
    outs, lses = states(3, 0, 4)
    merge(torch.empty(0, 4, 128), torch.empty(0, 4), outs, lses)
    assert not driver.launches
    assert driver.load_count == 0


@check
def picks_the_image_of_the_capability(driver):
    import torch

    driver.set_capability(103)
    operators().aot_merge_states(torch.empty(2, 4, 128), torch.empty(2, 4), *states())
    assert driver.launches.pop().entry == "m3s_combine_f32_f32_sm103a_0"


@check
def names_what_it_has_for_another_capability(driver):
    import torch

    driver.set_capability(89)
    text = error_of(operators().aot_merge_states, torch.empty(2, 4, 128), torch.empty(2, 4), *states())
    assert "9.0, 10.0, 10.3" in text and "the device has 8.9" in text
    assert not driver.launches


@check
def refuses_what_would_leave_a_tensor(driver):
    import torch

    merge = operators().aot_merge_states
    outs, lses = states()
    out, lse = torch.empty(2, 4, 128), torch.empty(2, 4)
    bad = [
        ((out, lse, outs[0], lses), "outs: expected [N >= 1, T, H, 128]"),
        ((out, lse, outs[:0], lses[:0]), "outs: expected [N >= 1, T, H, 128]"),
        ((out, lse, outs, lses[:, :1]), "lses: expected [N, T, H]"),
        ((out[:1], lse, outs, lses), "out: expected [T, H, 128]"),
        ((out, lse[:, :1], outs, lses), "lse: expected [T, H]"),
        ((out, lse.double(), outs, lses), "expected float32"),
        ((out, lse, outs, lses.half()), "expected float32"),
        ((out, lse, outs.bfloat16(), lses), "one 16-bit dtype for both"),
        ((out.double(), lse, outs, lses), "float32, bfloat16 or float16 result"),
        ((torch.empty(2, 4, 256)[..., ::2], lse, outs, lses), "contiguous last dimension"),
        ((torch.empty(2, 4, 130)[..., :128], lse, outs, lses), "multiples of 16 bytes"),
        ((out, lse, torch.empty(3 * 2 * 4 * 128 + 1)[1:].view(3, 2, 4, 128), lses), "multiples of 16 bytes"),
    ]
    for arguments, message in bad:
        text = error_of(merge, *arguments)
        assert message in text, (message, text)
    assert not driver.launches


@check.without_driver
def refuses_cpu_tensors_without_such_a_driver(driver):
    """Here no driver is preloaded."""
    import torch

    assert driver is None
    text = error_of(operators().aot_merge_states, torch.empty(2, 4, 128), torch.empty(2, 4), *states())
    assert "libcuda.so.1 not found" in text or "expects CUDA tensors, got CPU tensors" in text, text


# A device's capability and an image are looked up once a process.
PROCESSES = [
    [
        "an_empty_problem_launches_nothing",
        "loads_an_image_once",
        "packs_every_parameter",
        "strides_beyond_32_bits_survive",
        "refuses_what_would_leave_a_tensor",
    ],
    ["picks_the_image_of_the_capability"],
    ["names_what_it_has_for_another_capability"],
    ["refuses_cpu_tensors_without_such_a_driver"],
]


def test_every_check_is_run():
    assert sorted(name for names in PROCESSES for name in names) == sorted(check.functions)


@needs_variant
@pytest.mark.parametrize("names", PROCESSES, ids=lambda names: names[-1])
def test_launch(names):
    check.run(*names)


if __name__ == "__main__":
    check.main()
