"""The operators among torch's other features, on a GPU: opcheck, torch.compile, modes, streams and threads, forks, versions.

The same questions are asked of the emulated operators in test_emulated_torch_integration.py, whose calls these are.
"""

import copy
import pickle
import subprocess
import sys
import threading

import pytest
import torch
from test_emulated_torch_integration import BF16, E4M3, FUNCTIONS, on_aot, operator_calls, public_calls, small
from test_ops import calls, counting_backend, equal, opcheck
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_map_only

import m3_sparse
from m3_sparse import _architecture, ops


def on_gpu(values, device="cuda"):
    return tree_map_only(torch.Tensor, lambda x: x.to(device), values)


def gpu_calls(case, device="cuda"):
    return {name: (f, on_gpu(arguments, device)) for name, (f, arguments) in public_calls(case).items()}


def everything(prepared):
    return [x for function, arguments in prepared.values() for x in on_aot(function, arguments)]


@pytest.fixture
def filled():
    """New tensors hold NaN, and 255 where they are bytes: what aot_union_lists leaves out, since no list holds it, compares."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("number", range(len(operator_calls())))
def test_opcheck_of_the_aot_operators(filled, number):
    name, arguments, options = operator_calls()[number]
    assert set(opcheck(getattr(ops.ops, name).default, on_gpu(arguments), options).values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", list(calls()))
def test_opcheck_of_the_torch_operators(name):
    op, arguments = calls()[name]
    assert set(opcheck(getattr(ops.ops, op).default, on_gpu(arguments)).values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_compiles_in_one_graph_whatever_the_sizes(name):
    torch.compiler.reset()
    _architecture._architectures.clear()  # as in a process whose first call is compiled
    backend, graphs = counting_backend()
    compiled = None
    for q_lens, kv_lens in (((3, 0, 1, 0, 2), (700, 50, 140, 3, 7)), ((1, 2), (140, 300))):
        function, arguments = gpu_calls(small(q_lens, kv_lens, poison="zero"))[name]
        compiled = compiled or torch.compile(function, fullgraph=True, backend=backend, dynamic=True)
        assert equal(on_aot(compiled, arguments), on_aot(function, arguments))
    assert len(graphs) == 1


def test_inductor():
    pytest.importorskip("triton")
    torch.compiler.reset()
    function, arguments = gpu_calls(small(poison="zero"))["sparse"]

    def layer(q, *rest):
        out, lse = function(q * 2, *rest)
        return out + 1, lse

    assert equal(on_aot(torch.compile(layer, fullgraph=True), arguments), on_aot(layer, arguments))


def test_fake_results_look_like_the_real_ones():
    for page, kv_dtype in ((128, BF16), (64, E4M3)):
        for name, (function, arguments) in gpu_calls(small(page=page, kv_dtype=kv_dtype, pad_rows=1)).items():
            if name == "dense" and kv_dtype == E4M3:
                continue
            real = on_aot(function, arguments)
            with FakeTensorMode() as mode:
                fake = on_aot(function, tree_map_only(torch.Tensor, mode.from_tensor, arguments))
            facts = [[(x.shape, x.stride(), x.dtype, x.device) for x in made] for made in (fake, real)]
            assert facts[0] == facts[1], name


@pytest.mark.parametrize("mode", ["inference", "autocast", "deterministic", "dtype", "cuda", "meta"])
def test_modes_change_nothing(mode):
    prepared = gpu_calls(small(poison="zero"))
    want = everything(prepared)
    if mode == "inference":
        with torch.inference_mode():
            got = everything(prepared)
    elif mode == "autocast":
        with torch.autocast("cuda", dtype=torch.float16):
            got = everything(prepared)
    elif mode == "deterministic":  # every output and every workspace starts as NaN
        torch.use_deterministic_algorithms(True)
        try:
            got = everything(prepared)
        finally:
            torch.use_deterministic_algorithms(False)
    elif mode == "dtype":
        torch.set_default_dtype(torch.float64)
        try:
            got = everything(prepared)
        finally:
            torch.set_default_dtype(torch.float32)
    else:
        torch.set_default_device(mode)
        try:
            got = everything(prepared)
        finally:
            torch.set_default_device(None)
    assert equal(got, want) and [x.dtype for x in got] == [x.dtype for x in want]


@pytest.mark.parametrize("mode", ["autocast", "deterministic"])
def test_modes_change_nothing_in_the_torch_backend_and_its_gradients(monkeypatch, mode):
    # Without this setting torch refuses cuBLAS in deterministic mode, before it is used for the first time.
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    case = small(dtype=torch.float32, heads=(4, 2), poison="zero", style="clean")
    (q, k, v, ids, table), lengths = on_gpu((case.sparse()[0], case.lengths()))
    (index_q, index_k, index_table), _ = on_gpu(case.index())

    def made():
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        out = m3_sparse.sparse_attention(*inputs, ids, table, **lengths)
        dense = m3_sparse.dense_attention(*inputs, table, **lengths)
        scores = m3_sparse.block_scores(index_q, index_k, index_table, **lengths)
        return [out, dense, scores, *torch.autograd.grad(out.square().sum() + dense.square().sum(), inputs)]

    with m3_sparse.backend("torch"):
        want = made()
        if mode == "autocast":
            with torch.autocast("cuda", dtype=torch.bfloat16):
                got = made()
        else:
            torch.use_deterministic_algorithms(True)
            try:
                got = made()
                assert equal(got, made())
            finally:
                torch.use_deterministic_algorithms(False)
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)  # autocast's error is 1e-3 and more


def test_default_device_leaves_cpu_tensors_alone():
    (q, k, v, table), lengths = small(poison="zero").dense()
    want = m3_sparse.dense_attention(q, k, v, table, **lengths)
    torch.set_default_device("cuda")
    try:
        assert torch.equal(m3_sparse.dense_attention(q, k, v, table, **lengths), want)
    finally:
        torch.set_default_device(None)


def test_writes_are_seen_by_autograd():
    (q, k, v, table), lengths = on_gpu(small().dense())
    out = torch.zeros_like(q)
    scale = out.clone().requires_grad_()
    loss = (scale * out).sum()
    with m3_sparse.backend("aot"), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        m3_sparse.dense_attention(q, k, v, table, **lengths, out=out)
        loss.backward()


def test_vmap_is_refused():
    function, arguments = gpu_calls(small(poison="zero"))["sparse"]
    with m3_sparse.backend("aot"), pytest.raises(NotImplementedError, match="no batching rule for torch.vmap"):
        torch.vmap(function, (0, *[None] * 6))(torch.stack([arguments[0]] * 2), *arguments[1:])


def test_copies_of_a_layer():
    (q, k, v, table), lengths = on_gpu(small(poison="zero").dense())
    lengths = [lengths[name] for name in ("cu_seqlens_q", "seqused_k")]
    layer = m3_sparse.layers.DenseAttention().cuda()
    with m3_sparse.backend("aot"):
        want = layer(q, k, v, table, *lengths)
        for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert torch.equal(twin(q, k, v, table, *lengths), want)


# ---- streams and threads ----


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "store"])
def test_runs_on_the_current_stream(name):
    """The input is written late on a stream of its own; a launch elsewhere would read what was there before."""
    function, arguments = gpu_calls(small(poison="zero"))[name]
    want = on_aot(function, arguments)
    late = arguments[0].clone()
    arguments = (torch.zeros_like(late), *arguments[1:])
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        arguments[0].copy_(late)
        got = on_aot(function, arguments)
        assert not stream.query()  # it was still busy: the call has waited for nothing
        stream.synchronize()
    assert equal(got, want)


def threads_at_once(count, rounds):
    """Each on a stream of its own, with a problem of its own, all of them from the first launch on."""
    prepared = [gpu_calls(small((1 + i, 2), (140, 300), seed=i, poison="zero")) for i in range(count)]
    made, errors = [[] for _ in range(count)], []
    start = threading.Barrier(count)

    def work(i):
        try:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.default_stream())
            start.wait()
            with torch.cuda.stream(stream):
                for _ in range(rounds):
                    # The backend's name belongs to the process, so it is set outside.
                    made[i].append([x for f, a in prepared[i].values() for x in tree_flatten(f(*a))[0]])
            stream.synchronize()
        except Exception as error:  # noqa: BLE001  told by the main thread
            errors.append(error)

    torch.cuda.synchronize()
    with m3_sparse.backend("aot"):
        threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors, errors
    for i in range(count):
        want = everything(prepared[i])
        assert len(made[i]) == rounds and all(equal(x, want) for x in made[i])


def test_threads_on_streams_of_their_own():
    threads_at_once(8, 20)


LOADER = """
import sys
sys.path[:0] = sys.argv[2:]
import conftest
sys.meta_path.insert(0, conftest.VariantFinder(sys.argv[1]))
"""


def in_a_process(code, variant_folder, **options):
    folders = [path for path in sys.path if path]
    command = [sys.executable, "-c", LOADER + code, str(variant_folder), *folders]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **options)


def test_threads_race_for_the_first_load(variant_folder):
    """In a new process no cubin is loaded yet, and all threads want all of them."""
    code = "import test_torch_integration_gpu as t; t.threads_at_once(8, 2); print('same')"
    done = in_a_process(code, variant_folder)
    assert done.returncode == 0 and done.stdout.strip() == "same", done.stderr


# ---- forks ----

CHILD = """
import os
import torch
import m3_sparse
assert not torch.cuda.is_initialized() and m3_sparse.explain("sparse_attention")
def use(word):
    x = torch.ones(2, 3, 2, 128, device="cuda")
    with m3_sparse.backend("aot"):
        out, lse = m3_sparse.merge_states(x, torch.zeros(2, 3, 2, device="cuda"))
    assert (out == 1).all() and abs(lse.mean().item() - 0.6931) < 1e-3
    os.write(1, word)
def fork(function):
    child = os.fork()
    if child == 0:
        try:
            function()
        except BaseException as error:
            os.write(1, (type(error).__name__ + ": " + str(error)[:200] + "\\n").encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
"""


def test_a_forked_child_uses_the_gpu_that_its_parent_has_not_touched(variant_folder):
    """CPU calls in the parent first: they must not start CUDA either."""
    code = (
        CHILD
        + """
m3_sparse.merge_states(torch.ones(2, 3, 2, 128), torch.zeros(2, 3, 2))
assert not torch.cuda.is_initialized()
for _ in range(2):
    fork(lambda: use(b"child "))
use(b"parent")
"""
    )
    done = in_a_process(code, variant_folder)
    assert done.stdout == "child child parent", done.stdout + done.stderr


def test_a_child_forked_after_use_is_told_to_spawn(variant_folder):
    code = (
        CHILD
        + """
use(b"parent\\n")
x, y = torch.ones(2, 3, 2, 128, device="cuda"), torch.zeros(2, 3, 2, device="cuda")
fork(lambda: m3_sparse.merge_states(x, y))
fork(lambda: use(b"child"))
"""
    )
    done = in_a_process(code, variant_folder)
    first, *lines = done.stdout.splitlines()
    lines = [line for line in lines if "Error: " in line]
    assert first == "parent" and len(lines) == 2, done.stdout + done.stderr
    # torch's own errors, at the first allocation: on the parent's tensors, and on new ones.
    assert "initialization error" in lines[0] or "spawn" in lines[0]
    assert lines[1].startswith("RuntimeError") and "spawn" in lines[1]
