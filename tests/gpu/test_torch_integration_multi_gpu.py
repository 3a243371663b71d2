"""Tensors on a GPU that is not the current one. Needs two GPUs; with one, every test says so and is skipped."""

import threading

import pytest
import torch
from test_emulated_torch_integration import FUNCTIONS, on_aot, small
from test_ops import counting_backend, equal
from test_torch_integration_gpu import everything, gpu_calls, in_a_process, on_gpu
from torch.utils._pytree import tree_flatten

import m3_sparse

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < 2,
    reason=f"NOT TESTED, NEEDS TWO GPUS: torch.cuda.device_count() is {torch.cuda.device_count()}",
)


@pytest.fixture(autouse=True)
def stays_current():
    """Whatever is called, the current device of this thread stays what it was."""
    before = torch.cuda.current_device()
    yield
    assert torch.cuda.current_device() == before


def on_cpu(tensors):
    return [x.cpu() for x in tensors]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("current, device", [(0, 1), (1, 0)])
def test_tensors_elsewhere_give_the_same_bits(name, current, device):
    case = small(poison="zero")
    function, arguments = gpu_calls(case, f"cuda:{current}")[name]
    want = on_cpu(on_aot(function, arguments))
    function, arguments = gpu_calls(case, f"cuda:{device}")[name]
    with torch.cuda.device(current):
        got = on_aot(function, arguments)
        assert torch.cuda.current_device() == current
    assert all(x.device == torch.device("cuda", device) for x in got) and equal(on_cpu(got), want)


def test_the_torch_backend_elsewhere():
    (q, k, v, ids, table), lengths = small(dtype=torch.float32, heads=(4, 2), poison="zero").sparse()
    want = m3_sparse.sparse_attention(q, k, v, ids, table, **lengths)
    q, k, v, ids, table, lengths = on_gpu((q, k, v, ids, table, lengths), "cuda:1")
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = m3_sparse.sparse_attention(*inputs, ids, table, **lengths)
    torch.testing.assert_close(out.cpu(), want, atol=1e-5, rtol=1e-5)
    assert all(x.device.index == 1 and x.isfinite().all() for x in torch.autograd.grad(out.square().sum(), inputs))


def test_workspaces_lie_on_the_tensors_device():
    prepared = gpu_calls(small(poison="zero"), "cuda:1")
    everything(prepared)
    torch.cuda.reset_peak_memory_stats(0)
    before = torch.cuda.max_memory_allocated(0)
    everything(prepared)
    assert torch.cuda.max_memory_allocated(0) == before


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "store"])
def test_the_current_stream_of_the_other_device_is_used(name):
    """The input is written late on that device's current stream; elsewhere the launch would read what was there before."""
    function, arguments = gpu_calls(small(poison="zero"), "cuda:1")[name]
    want = on_aot(function, arguments)
    late = arguments[0].clone()
    arguments = (torch.zeros_like(late), *arguments[1:])
    torch.cuda.synchronize(1)
    with torch.cuda.device(1):
        stream, before = torch.cuda.Stream(), torch.cuda.current_stream()
        torch.cuda.set_stream(stream)
        torch.cuda._sleep(20_000_000)
    try:
        assert torch.cuda.current_device() == 0
        arguments[0].copy_(late)
        got = on_aot(function, arguments)
        assert not stream.query()
        stream.synchronize()
    finally:
        with torch.cuda.device(1):
            torch.cuda.set_stream(before)
    assert equal(got, want)


def test_a_graph_of_the_other_device():
    function, arguments = gpu_calls(small(poison="zero"), "cuda:1")["sparse"]
    want = on_aot(function, arguments)
    with torch.cuda.device(1):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), torch.cuda.device(0):
            got = on_aot(function, arguments)
        for x in got:
            x.fill_(7)
        graph.replay()
        torch.cuda.synchronize()
    assert equal(got, want)


def test_compiled_elsewhere():
    torch.compiler.reset()
    backend, graphs = counting_backend()
    function, arguments = gpu_calls(small(poison="zero"), "cuda:1")["sparse"]
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    assert equal(on_aot(compiled, arguments), on_aot(function, arguments)) and len(graphs) == 1


def test_a_thread_for_each_device():
    """The second threads use their device without making it current."""
    case = small(poison="zero")
    want = on_cpu(everything(gpu_calls(case)))
    prepared = [gpu_calls(case, f"cuda:{i % 2}") for i in range(4)]
    made, errors = [[] for _ in prepared], []
    start = threading.Barrier(len(prepared))

    def work(i):
        try:
            if i < 2:
                torch.cuda.set_device(i)
            start.wait()
            for _ in range(10):
                made[i].append([x for f, a in prepared[i].values() for x in tree_flatten(f(*a))[0]])
        except Exception as error:  # noqa: BLE001  told by the main thread
            errors.append(error)

    with m3_sparse.backend("aot"):
        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(prepared))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors, errors
    assert all(equal(on_cpu(x), want) for rounds in made for x in rounds)


def test_tensors_of_two_devices_are_refused():
    (q, k, v, table), lengths = on_gpu(small().dense())
    with pytest.raises(ValueError, match="k_cache must be on cuda:0 like the other tensors, got cuda:1"):
        m3_sparse.dense_attention(q, k.to("cuda:1"), v, table, **lengths)
    with pytest.raises(ValueError, match="seqused_k must be on cuda:0"):
        m3_sparse.dense_attention(q, k, v, table, **{**lengths, "seqused_k": lengths["seqused_k"].to("cuda:1")})


def test_first_use_is_of_the_other_device(variant_folder):
    """In a new process nothing is loaded, and the current device is one that nothing was done on."""
    code = """
import torch
import test_torch_integration_gpu as t
import test_emulated_torch_integration as e
prepared = t.gpu_calls(e.small(poison="zero"), "cuda:1")
first = [x.cpu() for x in t.everything(prepared)]
assert torch.cuda.current_device() == 0
second = [x.cpu() for x in t.everything(t.gpu_calls(e.small(poison="zero"), "cuda:0"))]
assert t.equal(first, second)
print("same")
"""
    done = in_a_process(code, variant_folder)
    assert done.returncode == 0 and done.stdout.strip() == "same", done.stderr
