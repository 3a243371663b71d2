"""merge_states on a GPU: the combine kernel through the launcher, against float64."""

import ctypes
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import m3_sparse

ROOT = Path(__file__).resolve().parent.parent.parent
DEVICE = "cuda"
DTYPES = [
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
]
SHAPES = [(1, 1, 1), (2, 1, 64), (3, 5, 7), (4, 33, 4), (5, 17, 16), (16, 64, 64), (31, 9, 3), (64, 2, 8), (7, 1025, 2)]


def make_states(n, t, h, dtype, seed=0, empty=0.3, spread=8.0, device=DEVICE):
    """Random states, of which a share is empty (LSE -inf, NaN output); one whole row is."""
    generator = torch.Generator(device=device).manual_seed(seed)
    outs = torch.randn(n, t, h, 128, device=device, generator=generator).to(dtype)
    lses = torch.randn(n, t, h, device=device, generator=generator) * spread
    lses[torch.rand(n, t, h, device=device, generator=generator) < empty] = float("-inf")
    lses[:, t // 2, h // 2] = float("-inf")
    outs[lses == float("-inf")] = float("nan")
    return outs, lses


def exact(outs, lses):
    """float64; empty states are taken out, not multiplied by zero."""
    visible = lses > float("-inf")
    values = torch.where(visible[..., None], outs.double(), 0.0)
    lse = torch.logsumexp(lses.double(), 0)
    weights = torch.where(visible, (lses.double() - lse).exp(), 0.0)
    return (weights[..., None] * values).sum(0), lse


def assert_right(out, lse, outs, lses):
    want, want_lse = exact(outs, lses)
    empty = want_lse == float("-inf")
    assert torch.equal(lse == float("-inf"), empty)
    assert torch.equal(out[empty], torch.zeros_like(out[empty]))
    assert ((lse[~empty].double() - want_lse[~empty]).abs() <= 2e-6 * (1 + want_lse[~empty].abs())).all()
    # One rounding of the result and a few of fp32; with convex weights the error is bounded by the largest |value|.
    eps = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[out.dtype]
    largest = torch.where(lses[..., None] > float("-inf"), outs.double().abs(), 0.0).amax((0, 3), keepdim=True)[0]
    assert ((out.double() - want).abs() <= 1.01 * eps * largest + 1e-30).all()


def poisoned(t, h, dtype, guard=64):
    """Outputs inside larger buffers of NaN, with rows apart: what must not be written shows."""
    out = torch.full((t + 2 * guard, h, 136), float("nan"), dtype=dtype, device=DEVICE)
    lse = torch.full((t + 2 * guard, h + 3), float("nan"), device=DEVICE)
    return out, lse, out[guard : guard + t, :, :128], lse[guard : guard + t, :h]


@pytest.mark.parametrize("n, t, h", SHAPES)
@pytest.mark.parametrize("dtype, out_dtype", DTYPES)
def test_against_float64(n, t, h, dtype, out_dtype):
    outs, lses = make_states(n, t, h, dtype, seed=n * 1000 + t)
    out, lse = m3_sparse.merge_states(outs, lses, out_dtype=out_dtype)
    assert out.dtype == out_dtype and lse.dtype == torch.float32
    assert_right(out, lse, outs, lses)


def test_runs_the_compiled_kernel():
    outs, lses = make_states(3, 4, 5, torch.float32)
    text = m3_sparse.explain("merge_states", outs=outs, lses=lses)
    assert "-> aot" in text, text
    with m3_sparse.backend("aot"):
        assert_right(*m3_sparse.merge_states(outs, lses), outs, lses)


@pytest.mark.parametrize("dtype, out_dtype", DTYPES)
def test_writes_every_element_and_nothing_else(dtype, out_dtype):
    t, h = 37, 5
    outs, lses = make_states(6, t, h, dtype, seed=3)
    out_buffer, lse_buffer, out, lse = poisoned(t, h, out_dtype)
    operator()(out, lse, outs, lses)
    assert_right(out, lse, outs, lses)
    out.fill_(float("nan"))
    lse.fill_(float("nan"))
    assert out_buffer.isnan().all() and lse_buffer.isnan().all()


def operator():
    from m3_sparse import ops

    return getattr(ops, "ops", ops).aot_merge_states


@pytest.mark.parametrize("layout", ["token", "head", "state_last", "padded"])
def test_strides(layout):
    outs, lses = make_states(5, 12, 6, torch.bfloat16, seed=4)
    order = {"token": (0, 1, 2), "head": (2, 0, 1), "state_last": (1, 2, 0), "padded": (0, 1, 2)}[layout]
    back = [order.index(i) for i in range(3)]
    strided = outs.permute(*order, 3).contiguous().permute(*back, 3)
    if layout == "padded":
        strided = torch.nn.functional.pad(outs, (0, 8), value=float("nan"))[..., :128]
    strided_lses = lses.permute(*order).contiguous().permute(*back)
    got = m3_sparse.merge_states(strided, strided_lses)
    want = m3_sparse.merge_states(outs, lses)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_repeats_and_batch_composition_are_bitwise_equal():
    outs, lses = make_states(9, 100, 8, torch.float32, seed=5)
    first = m3_sparse.merge_states(outs, lses)
    for _ in range(20):
        again = m3_sparse.merge_states(outs, lses)
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    part = m3_sparse.merge_states(outs[:, 31:57, 2:5], lses[:, 31:57, 2:5])
    assert torch.equal(first[0][31:57, 2:5], part[0]) and torch.equal(first[1][31:57, 2:5], part[1])


def test_nan_and_infinite_lse_are_not_hidden():
    outs, lses = make_states(3, 4, 2, torch.float32, seed=6, empty=0.0)
    lses[1, 0, 0], lses[1, 1, 0] = float("nan"), float("inf")
    out, lse = m3_sparse.merge_states(outs, lses)
    assert out[0, 0].isnan().all() and lse[0, 0].isnan()
    assert out[1, 0].isnan().all() and lse[1, 0].isnan()
    assert not out[3].isnan().any()


def test_extreme_lses():
    outs, _ = make_states(4, 2, 2, torch.float32, seed=7, empty=0.0)
    outs.nan_to_num_()
    for scale in (0.0, 1.0, 1e4, 1e30):
        lses = torch.arange(4.0, device=DEVICE)[:, None, None].expand(4, 2, 2).contiguous() * scale - scale
        assert_right(*m3_sparse.merge_states(outs, lses), outs, lses)


def test_offsets_beyond_32_bits():
    n, t, h = 2, 70_000, 64  # 4.6 GB of states
    outs = torch.empty(n, t, h, 128, device=DEVICE).normal_()
    lses = torch.randn(n, t, h, device=DEVICE)
    out, lse = m3_sparse.merge_states(outs, lses)
    for rows in (slice(0, 50), slice(t // 2, t // 2 + 50), slice(t - 50, t)):
        assert_right(out[rows], lse[rows], outs[:, rows], lses[:, rows])


def test_graph_replay_follows_its_inputs():
    outs, lses = make_states(8, 40, 16, torch.float32, seed=8)
    m3_sparse.merge_states(outs, lses)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = m3_sparse.merge_states(outs, lses, out_dtype=torch.bfloat16)
    for seed in range(9, 14):
        fresh = make_states(8, 40, 16, torch.float32, seed=seed)
        outs.copy_(fresh[0])
        lses.copy_(fresh[1])
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        graph.replay()
        assert_right(out, lse, outs, lses)
    first = (out.clone(), lse.clone())
    for _ in range(1000):
        graph.replay()
    assert torch.equal(first[0], out) and torch.equal(first[1], lse)


FIRST_USE_IN_CAPTURE = """
import importlib.util, sys, torch
spec = importlib.util.spec_from_file_location("m3_sparse", sys.argv[1] + "/__init__.py", submodule_search_locations=[sys.argv[1]])
m3_sparse = sys.modules["m3_sparse"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(m3_sparse)
assert not torch.cuda.is_initialized(), "import initialised CUDA"
outs, lses = torch.randn(3, 4, 5, 128, device="cuda"), torch.randn(3, 4, 5, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    out, lse = m3_sparse.merge_states(outs, lses)
graph.replay()
with m3_sparse.backend("torch"):
    want, _ = m3_sparse.merge_states(outs, lses)
torch.testing.assert_close(out, want)
print("right")
"""


def test_first_use_inside_a_capture(variant_folder):
    command = [sys.executable, "-c", FIRST_USE_IN_CAPTURE, str(variant_folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "right\n", done.stderr


def test_two_streams():
    problems = [make_states(8, 256, 16, torch.float32, seed=20 + i) for i in range(2)]
    streams = [torch.cuda.Stream() for _ in problems]
    results = [[], []]
    torch.cuda.synchronize()
    for _ in range(50):
        for stream, problem, result in zip(streams, problems, results):
            with torch.cuda.stream(stream):
                result.append(m3_sparse.merge_states(*problem))
    torch.cuda.synchronize()
    for problem, result in zip(problems, results):
        assert_right(*result[0], *problem)
        for out, lse in result:
            assert torch.equal(out, result[0][0]) and torch.equal(lse, result[0][1])


def test_waits_for_the_current_stream_only():
    """A long kernel before it on the same stream: the merge must see its result, and must not block the host."""
    outs, lses = make_states(4, 64, 16, torch.float32, seed=30)
    late = torch.full_like(outs, 3.0)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)
        late.copy_(outs)
        out, lse = m3_sparse.merge_states(late, lses)
        event = torch.cuda.Event()
        event.record()
        assert not event.query(), "the call waited for the device"
    torch.cuda.synchronize()
    assert_right(out, lse, outs, lses)


def test_threads_without_a_context():
    """A thread that has made no CUDA runtime call has no current context."""
    outs, lses = make_states(3, 16, 4, torch.float32, seed=31)
    merge = operator()
    results = [(torch.empty(16, 4, 128, device=DEVICE), torch.empty(16, 4, device=DEVICE)) for _ in range(8)]
    threads = [threading.Thread(target=merge, args=(*result, outs, lses)) for result in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    for result in results:
        assert_right(*result, outs, lses)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_current():
    outs, lses = make_states(3, 16, 4, torch.float32, seed=32, device="cuda:1")
    assert torch.cuda.current_device() == 0
    out, lse = m3_sparse.merge_states(outs, lses)
    assert torch.cuda.current_device() == 0 and out.device == outs.device
    assert_right(out, lse, outs, lses)


def test_compile_and_opcheck():
    outs, lses = make_states(3, 6, 4, torch.bfloat16, seed=33)
    torch._dynamo.reset()
    compiled = torch.compile(m3_sparse.merge_states, fullgraph=True, backend="aot_eager")
    want = m3_sparse.merge_states(outs, lses)
    got = compiled(outs, lses)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    empty = torch.zeros_like(want[0]), torch.zeros_like(want[1])
    torch.library.opcheck(operator().default, (*empty, outs.nan_to_num(), lses))


def test_misaligned_and_foreign_arguments_raise():
    outs, lses = make_states(3, 6, 4, torch.float32, seed=34, empty=0.0)
    outs.nan_to_num_()
    shifted = torch.empty(outs.numel() + 1, device=DEVICE)[1:].view(outs.shape).copy_(outs)
    with m3_sparse.backend("aot"):
        with pytest.raises((ValueError, NotImplementedError), match="16"):
            m3_sparse.merge_states(shifted, lses)
        with pytest.raises((ValueError, NotImplementedError, TypeError)):
            m3_sparse.merge_states(outs, lses.cpu())


KERNELS = sorted((ROOT / "build" / "kernels").glob("*.json")) if (ROOT / "build" / "kernels").exists() else []


@pytest.mark.skipif(not KERNELS, reason="build/kernels isn't here")
def test_the_driver_sees_the_manifests_parameters():
    torch.zeros(1, device=DEVICE)
    cuda = ctypes.CDLL("libcuda.so.1")
    capability = "sm_{}{}a".format(*torch.cuda.get_device_capability())
    seen = {True: 0, False: 0}
    for path in KERNELS:
        facts = json.loads(path.read_text())
        if path.name == "index.json":
            continue
        image = path.with_suffix(".cubin").read_bytes()
        library, kernel = ctypes.c_void_p(), ctypes.c_void_p()
        loaded = cuda.cuLibraryLoadData(ctypes.byref(library), image, None, None, 0, None, None, 0)
        found = loaded or cuda.cuLibraryGetKernel(ctypes.byref(kernel), library, facts["entry"].encode())
        if facts["arch"] != capability:
            assert found != 0, "a foreign image was accepted"
            seen[False] += 1
            continue
        assert found == 0, (path.name, loaded, found)
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        for i, param in enumerate(facts["params"]):
            assert cuda.cuKernelGetParamInfo(kernel, ctypes.c_size_t(i), ctypes.byref(offset), ctypes.byref(size)) == 0
            assert (offset.value, size.value) == (param["offset"], param["size"]), (path.name, i)
        assert cuda.cuKernelGetParamInfo(kernel, ctypes.c_size_t(len(facts["params"])), ctypes.byref(offset), None) != 0
        seen[True] += 1
    assert seen[True] > 0
