"""The functions among torch's other features: inference mode, autocast, deterministic mode, default device and dtype, copies of
modules, forks and threads. Compilation and tracing are in test_torch_tracing.py, torch.func in test_torch_func.py.

On CPU tensors, which the torch backend takes. The aot backend has the same questions in test_emulated_torch_integration.py
and tests/gpu; opcheck of the torch operators, and their compilation and gradients, are in test_ops.py.
"""

import contextlib
import copy
import io
import os
import pickle
import subprocess
import sys
import threading
import traceback

import pytest
import torch
from test_ops import Problem, equal, public_calls
from test_torch_tracing import described
from torch.utils._pytree import tree_flatten

import m3_sparse


def results(p=None):
    """Everything that the public functions make of one problem, in one list."""
    return [x for f, arguments in public_calls(p or Problem()).values() for x in tree_flatten(f(*arguments))[0]]


def seeded_results(p):
    torch.manual_seed(0)  # merge_states draws its LSEs
    return results(p)


# ---- modes ----


def test_inference_mode():
    p = Problem()
    with torch.inference_mode():
        torch.manual_seed(0)
        made = results(Problem())
        assert all(x.is_inference() for x in made)
        out, lse = torch.empty_like(p.q), torch.empty(p.q.shape[:2])
        m3_sparse.dense_attention(p.q, p.k_cache, p.v_cache, p.block_table, **p.lengths, out=out, lse=lse)
    assert equal(made, seeded_results(p))
    # Tensors of inference mode are read outside it, as everywhere in torch.
    k_cache = made[1].new_zeros(p.k_cache.shape)
    with torch.inference_mode():
        k_cache = p.k_cache.clone()
    out = m3_sparse.dense_attention(p.q, k_cache, p.v_cache, p.block_table, **p.lengths)
    assert torch.equal(out, m3_sparse.dense_attention(p.q, p.k_cache, p.v_cache, p.block_table, **p.lengths))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(dtype, autocast):
    """What a call computes follows from its arguments: float32 products stay float32, those of the gradients too."""
    p = Problem(dtype)
    prepared = public_calls(p)

    def everything():
        made = [x for function, arguments in prepared.values() for x in tree_flatten(function(*arguments))[0]]
        inputs = [x.clone().requires_grad_() for x in (p.q, p.k_cache, p.v_cache)]
        out = m3_sparse.sparse_attention(*inputs, p.ids, p.block_table, **p.lengths)
        return [*made, *torch.autograd.grad(out.float().square().sum(), inputs)]

    want = everything()
    with torch.autocast("cpu", dtype=autocast):
        got = everything()
    assert equal(got, want) and [x.dtype for x in got] == [x.dtype for x in want]


def test_deterministic_mode_changes_nothing():
    """It also fills what torch.empty returns with NaN, so a byte that an operator left would show."""
    p = Problem()
    torch.manual_seed(0)
    want, lse = results(p), torch.randn(p.q.shape[:2])
    inputs = [x.clone().requires_grad_() for x in (p.q, p.k_cache, p.v_cache)]
    out = m3_sparse.dense_attention(*inputs, p.block_table, **p.lengths)
    grads = torch.autograd.grad(out.square().sum(), inputs)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(1).isnan()
        assert equal(seeded_results(p), want) and lse.isfinite().all()
        out = m3_sparse.dense_attention(*inputs, p.block_table, **p.lengths)
        assert equal(torch.autograd.grad(out.square().sum(), inputs), grads)
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def default(set_default, value, back):
    set_default(value)
    try:
        yield
    finally:
        set_default(back)


def fixed_calls():
    """Public calls whose own tensors are made here, before a default is changed."""
    p = Problem()
    made = dict(public_calls(p))
    new = (p.q[:, :2].contiguous(), p.q[:, 2:].contiguous(), p.index_q[:, 0].contiguous())
    slots = torch.arange(p.q.shape[0]) * 3 - 1

    def store(k, v, index_k, *caches):
        caches = [x.clone() for x in caches]
        m3_sparse.store_kv(k, v, index_k, *caches, slots)
        return caches

    def train(q, k, v):
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        out, lse = m3_sparse.sparse_attention(*inputs, p.ids, p.block_table, **p.lengths, return_lse=True)
        return torch.autograd.grad((out, lse), inputs, (out.detach(), torch.zeros_like(lse)))

    def no_pages(q, table, cu, used):
        empty = q.new_zeros(0, 2, 128, 128)
        return m3_sparse.dense_attention(q, empty, empty, table, cu_seqlens_q=cu, seqused_k=used, return_lse=True)

    def contiguous(q, k, v, cu, used):
        lengths = {"cu_seqlens_q": cu, "seqused_k": used}
        return m3_sparse.dense_attention(q, k, v, None, **lengths, leftpad_k=used * 0 + 1)

    made["store_kv"] = (store, (*new, p.k_cache, p.v_cache, p.index_k_cache))
    made["train"] = (train, (p.q, p.k_cache, p.v_cache))
    made["no pages"] = (no_pages, (p.q, *p.tail))
    made["contiguous"] = (contiguous, (p.q, p.k_cache[:3], p.v_cache[:3], *p.tail[1:]))
    made["scaled"] = (
        lambda q, k, v, i, t, c, u, a, b: m3_sparse.sparse_attention(
            q, k, v, i, t, cu_seqlens_q=c, seqused_k=u, k_scale=a, v_scale=b
        ),
        (p.q, p.k_cache, p.v_cache, p.ids, *p.tail, p.k_scale, p.v_scale),
    )
    return made


@pytest.mark.parametrize(
    "set_default, value, back",
    [
        (torch.set_default_dtype, torch.float64, torch.float32),
        (torch.set_default_dtype, torch.bfloat16, torch.float32),
        (torch.set_default_dtype, torch.float16, torch.float32),
        (torch.set_default_device, "meta", None),
    ],
    ids=lambda x: str(getattr(x, "__name__", x)),
)
def test_defaults_of_device_and_dtype_change_nothing(set_default, value, back):
    prepared = fixed_calls()
    want = {name: tree_flatten(f(*arguments))[0] for name, (f, arguments) in prepared.items()}
    with default(set_default, value, back):
        for name, (function, arguments) in prepared.items():
            got = tree_flatten(function(*arguments))[0]
            assert [described(x) for x in got] == [described(x) for x in want[name]], name
            assert all(x.device.type == "cpu" for x in got) and equal(got, want[name]), name


# ---- copies of modules ----


class Block(torch.nn.Module):
    """A model of its own around the layers."""

    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(128, 128)
        self.sparse, self.dense = m3_sparse.layers.SparseAttention(), m3_sparse.layers.DenseAttention()

    def forward(self, q, k, v, index_q, index_k, *tail):
        q = self.project(q)
        return self.sparse(q, k, v, index_q, index_k, *tail) + self.dense(q, k, v, *tail)


def test_modules_are_copied_pickled_and_saved():
    p, block = Problem(), Block()
    inputs = (p.q, p.k_cache, p.v_cache, p.index_q, p.index_k_cache, *p.tail)
    want = block(*inputs)
    file = io.BytesIO()
    torch.save(block, file)
    file.seek(0)
    for twin in (copy.deepcopy(block), pickle.loads(pickle.dumps(block)), torch.load(file, weights_only=False)):
        assert torch.equal(twin(*inputs), want) and twin.project.weight is not block.project.weight
        twin(*inputs).sum().backward()
        assert twin.project.weight.grad is not None
    assert list(block.state_dict()) == ["project.weight", "project.bias"]
    compiled = torch.compile(copy.deepcopy(block), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*inputs), want)


def test_a_transformers_model_is_copied_pickled_and_saved(tmp_path):
    tiny_models = pytest.importorskip("tiny_models")
    pytest.importorskip("transformers")
    m3_sparse.register_transformers()
    model = tiny_models.load(tiny_models.save_text_model(tmp_path), "m3_sparse")
    ids = tiny_models.prompt(1, 300)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    with torch.no_grad():
        want = model(ids).logits
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
            assert torch.equal(twin(ids).logits, want)


def test_a_transformers_model_under_autocast(tmp_path):
    """As close to float32 as transformers' own attention is, in the forward and in the loss's gradient."""
    tiny_models = pytest.importorskip("tiny_models")
    pytest.importorskip("transformers")
    m3_sparse.register_transformers()
    folder = tiny_models.save_text_model(tmp_path, num_hidden_layers=2, mlp_layer_types=["dense", "dense"])
    ids = tiny_models.prompt(1, 300)
    found = {}
    for name in ("sdpa", "m3_sparse"):
        model = tiny_models.load(folder, name)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(ids, labels=ids).loss
            new = tiny_models.greedy(model, tokens=3, input_ids=ids)
        loss.backward()
        grads = torch.cat([x.grad.flatten() for x in model.parameters() if x.grad is not None])
        found[name] = loss.item(), grads, new
    assert abs(found["sdpa"][0] - found["m3_sparse"][0]) < 0.02 * found["sdpa"][0]
    assert torch.nn.functional.cosine_similarity(found["sdpa"][1], found["m3_sparse"][1], 0) > 0.98
    assert found["m3_sparse"][2].shape == (1, 3)


# ---- processes and threads ----


def in_a_fork(function):
    """Runs it in a forked child; its output if it fails."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        text = ""
        try:
            function()
        except BaseException:  # noqa: BLE001  told by the parent
            text = traceback.format_exc()
        os.write(write, text.encode()[-4000:])
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    assert status == 0 and not text, text


def test_a_forked_child_uses_what_its_parent_imported():
    p = Problem()
    want = seeded_results(p)

    def child():
        assert equal(seeded_results(Problem()), want)
        assert not torch.cuda.is_initialized()

    for _ in range(2):
        in_a_fork(child)
    assert equal(seeded_results(p), want)


def test_a_forked_child_imports(variant_folder):
    """The parent has torch only: first import in the child, in several of them, and then in the parent."""
    code = """
import importlib.util, os, sys, torch
def load():
    place = sys.argv[1] + "/__init__.py"
    spec = importlib.util.spec_from_file_location("m3_sparse", place, submodule_search_locations=[sys.argv[1]])
    module = sys.modules["m3_sparse"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    out, lse = module.merge_states(torch.ones(2, 1, 1, 128), torch.zeros(2, 1, 1))
    assert abs(lse.item() - 0.6931) < 1e-3 and not torch.cuda.is_initialized()
children = []
for _ in range(2):
    child = os.fork()
    if child == 0:
        load()
        os._exit(0)
    children.append(child)
assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
load()
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(variant_folder)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_threads_call_at_once():
    problems = [Problem(q_lens=(3 + i, 0, 6), seed=i) for i in range(4)]

    def made(p):
        calls = {name: c for name, c in public_calls(p).items() if name != "merge_states"}
        return [x for f, arguments in calls.values() for x in tree_flatten(f(*arguments))[0]]

    want = [made(p) for p in problems]
    wrong = []
    start = threading.Barrier(len(problems))

    def work(i):
        start.wait()
        for _ in range(3):
            if not equal(made(problems[i]), want[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(problems))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
