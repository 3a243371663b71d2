"""The choice of a backend, what `explain` and `capabilities` say, and what an import does."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_bad_input import VALID
from test_ops import Problem

import m3_sparse
from m3_sparse import _architecture, _arguments, _limits, capability

# ---- choice of backend ----


def test_explain_and_capabilities():
    p = Problem()
    text = m3_sparse.explain("sparse_attention", q=p.q, k_cache=p.k_cache)
    assert "-> torch, by default" in text and re.search(r"^jit +no +\S", text, re.MULTILINE)
    assert "the tensors are on cpu" in text and "takes dtypes bf16+bf16" in text
    assert "bad input" not in text
    arguments = {
        "q": p.q,
        "k_cache": p.k_cache,
        "v_cache": p.v_cache[:-1],
        "block_indices": p.ids,
        "block_table": p.block_table,
    }
    assert "bad input: ValueError: v_cache must" in m3_sparse.explain("sparse_attention", **arguments, **p.lengths)
    assert "raises NotImplementedError" in m3_sparse.explain("dense_attention", q=p.q.double(), k_cache=p.k_cache)
    assert "store_kv" in m3_sparse.explain("store_kv")
    with pytest.raises(ValueError, match="op must be one of block_scores"):
        m3_sparse.explain("attention")
    table = m3_sparse.capabilities()
    assert {row.op for row in table} == set(capability.OPERATIONS)
    assert {(row.op, row.backend) for row in table} == {
        (op, b) for op in capability.OPERATIONS for b in capability.BACKENDS
    }
    assert len(str(table).splitlines()) == len(table) + 1
    merged = [
        [cell.split(", ") for cell in line.strip("| ").split(" | ")] for line in table.markdown().splitlines()[2:]
    ]
    rows = [(o, b, a, tuple(d), s) for ops, (b,), archs, d, (s, *_) in merged for o in ops for a in archs]
    assert len(merged) < 0.6 * len(table) and len(rows) == len(table)
    assert set(rows) == {(r.op, r.backend, r.arch, r.dtypes, r.status.split(", ")[0]) for r in table}
    assert all(
        row.status in (capability.TESTED, capability.EMULATED, capability.JIT_UNTRIED) or "H200" in row.status
        for row in table
    )


@pytest.mark.parametrize(
    "name, reason",
    [
        ("aot", "runs on sm_90, sm_100, sm_103; the tensors are on cpu"),
        ("jit", "dense_attention on jit runs on sm_90, sm_100, sm_103"),
    ],
)
def test_forced_backend_raises_with_reasons(name, reason):
    p = Problem()
    before = torch.full_like(p.q, 7.0)
    refusal = pytest.raises(NotImplementedError, match=f"backend '{name}' was asked for by name.*{reason}")
    with m3_sparse.backend(name), refusal:
        m3_sparse.dense_attention(p.q, p.k_cache, p.v_cache, p.block_table, **p.lengths, out=before)
    assert (before == 7.0).all() and capability._forced is None
    with (
        m3_sparse.backend("aot"),
        pytest.raises(NotImplementedError, match="sm_90, sm_100, sm_103; the tensors are on cpu"),
    ):
        m3_sparse.merge_states(p.q[None], torch.zeros(1, *p.q.shape[:2]))


def test_all_reasons_are_named(monkeypatch):
    monkeypatch.setattr(capability, "BUILT", {})
    reasons = capability.refusals("merge_states", "aot", torch.device("cpu"), "fp16>fp32", True)
    assert len(reasons) == 4 and "contains no aot kernels" in reasons[0]
    assert "takes dtypes bf16>bf16" in reasons[3] and "no backward" in reasons[2]


def test_shapes_outside_the_dense_kernel():
    from m3_sparse import _limits

    q, cache = torch.zeros(3, 32, 128, dtype=torch.bfloat16), torch.zeros(2, 2, 128, 128, dtype=torch.bfloat16)
    assert _limits.dense_attention(q, cache, cache) is None
    assert _limits.dense_attention(q, cache) is None
    assert "at most 16 query heads a KV head, got 32 and 1" in _limits.dense_attention(q, cache[:, :1])
    assert "for v_cache" in _limits.dense_attention(q, cache, cache[:1].expand(2, 2, 128, 128))
    # An extent of one has no use for its stride: a single page, a single head.
    assert _limits.dense_attention(q, cache[:1].as_strided((1, 2, 128, 128), (0, 16384, 128, 1))) is None
    text = m3_sparse.explain("dense_attention", q=q, k_cache=cache[:, :1], v_cache=cache[:, :1])
    assert (
        re.search(r"^aot +no +\S", text, re.MULTILINE)
        and "at most 16 query heads" in text
        and "-> torch, by default" in text
    )


def test_shapes_outside_the_kernels():
    """What no kernel takes is in the reasons, and the default goes to torch for it."""
    q, k_cache = torch.zeros(3, 32, 128, dtype=torch.bfloat16), torch.zeros(2, 1, 128, 128, dtype=torch.bfloat16)
    ids = torch.zeros(3, 1, 40, dtype=torch.int32)
    text = m3_sparse.explain("sparse_attention", q=q, k_cache=k_cache, block_indices=ids)
    assert "at most 32 blocks a row, got 40" in text
    text = m3_sparse.explain("sparse_attention", q=q, k_cache=k_cache, block_indices=ids[..., :16])
    assert "at most 16 query heads a KV head, got 32 and 1 heads" in text
    rows = {"index_q": torch.zeros(70, 3, 128), "index_k_cache": torch.zeros(2, 128, 128)}
    table = torch.zeros(2, 1, dtype=torch.int32)
    assert "at most 32 rows a request" in m3_sparse.explain("block_scores", block_table=table, **rows)
    assert "topk of at most 32, got 33" in m3_sparse.explain("select_blocks", block_table=table, topk=33, **rows)
    new = {"k": q[:, :1], "k_cache": k_cache.to(torch.float8_e4m3fn), "index_k": torch.zeros(3, 128)}
    new["index_k_cache"] = torch.zeros(2, 128, 128).to(torch.float8_e5m2)
    assert "converts from one dtype to one" in m3_sparse.explain("store_kv", **new)
    with m3_sparse.backend("aot"), pytest.raises(NotImplementedError, match="at most 32 rows a request"):
        m3_sparse.block_scores(
            rows["index_q"].bfloat16(),
            rows["index_k_cache"].bfloat16(),
            table,
            cu_seqlens_q=torch.tensor([0, 35, 70], dtype=torch.int32),
            seqused_k=torch.tensor([128, 128], dtype=torch.int32),
        )


def test_indices_saturate_at_int32():
    """A page, length or slot beyond 32 bits must not come round to one that exists."""
    given = torch.tensor([[2**32 + 1, -(2**32) + 1, 2**31, 7, -1]])
    assert _limits.int32(given).tolist() == [[2**31 - 1, -(2**31), 2**31 - 1, 7, -1]]
    assert _limits.int32(given[:, 3:].int().expand(2, 2).t()).is_contiguous()


def test_choice_on_a_gpu(monkeypatch):
    """What the rule says for CUDA tensors, without one: a build with the kernels takes them where the table allows it,
    and only there.
    """
    device = torch.device("cuda", 0)
    monkeypatch.setattr(capability, "BUILT", {**capability.BUILT, ("merge_states", "aot"): None})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for arch, dtypes, grad, expected in (
        ((9, 0), (torch.bfloat16, torch.bfloat16), False, "aot"),
        ((10, 3), (torch.float32, torch.float16), False, "aot"),
        ((8, 0), (torch.bfloat16, torch.bfloat16), False, "torch"),
        ((9, 0), (torch.bfloat16, torch.float32), False, "torch"),
        ((9, 0), (torch.bfloat16, torch.bfloat16), True, "torch"),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_, arch=arch: arch)
        monkeypatch.setattr(_architecture, "_architectures", {})
        assert capability.choose("merge_states", device, *dtypes, grad) == expected
        assert capability.choose("sparse_attention", device, *dtypes[:1] * 2, grad) == "torch"


def test_backend_restores_and_nests():
    with m3_sparse.backend("torch"):
        with m3_sparse.backend("aot"):
            assert capability._forced == "aot"
        assert capability._forced == "torch"
        with pytest.raises(RuntimeError), m3_sparse.backend(None):
            raise RuntimeError
        assert capability._forced == "torch"
    assert capability._forced is None
    with pytest.raises(ValueError, match="backend must be one of torch, aot, jit or None, got 'cuda'"):
        m3_sparse.backend("cuda")


def test_a_context_may_be_entered_again_and_left_in_any_order():
    """As threads do it: nothing stays forced once all are closed."""
    again = m3_sparse.backend("torch")
    with again, again:
        assert capability._forced == "torch"
    assert capability._forced is None
    first, second = m3_sparse.backend("torch"), m3_sparse.backend("aot")
    first.__enter__()
    second.__enter__()
    first.__exit__()
    assert capability._forced == "aot"
    second.__exit__()
    assert capability._forced is None


def test_sizes_that_a_launch_cannot_count():
    """The default takes torch for them: any number of requests is allowed."""
    few, many = torch.zeros(65534), torch.zeros(65535)
    rows, keys = torch.zeros(3, 4, 128, dtype=torch.bfloat16), torch.zeros(2, 64, 128, dtype=torch.bfloat16)
    assert _limits.select_blocks(rows, few, 16, keys) is None and _limits.block_scores(rows, few) is None
    assert "at most 65534 requests, got 65535" in _limits.select_blocks(rows, many, 16, keys)
    assert "at most 65534 requests, got 65535" in _limits.block_scores(rows, many)
    ids, cache = torch.zeros(1, 1, 16), torch.zeros(1, 1, 64, 128)
    assert "at most 134217727 rows" in _limits.sparse_attention(rows[:1, :1].expand(2**27, 1, 128), cache, ids)
    assert "at most 65535 KV heads" in _limits.sparse_attention(rows[:1], cache.expand(1, 65536, 64, 128), ids)
    assert "at most 33554431 rows" in _limits.dense_attention(torch.zeros(2**25, 1, 128, device="meta"), cache)
    assert "at most 32766 heads" in _limits.store_kv(rows[:, :1].expand(3, 32767, 128), cache, None, None)
    table = torch.zeros(65535, 1, dtype=torch.int32)
    told = m3_sparse.explain("select_blocks", index_q=rows, index_k_cache=keys, block_table=table)
    assert "at most 65534 requests" in told and "-> torch, by default" in told


@pytest.mark.parametrize("op", capability.OPERATIONS)
def test_explain_says_what_is_wrong_and_never_raises(op):
    """Every argument in turn as a number, a vector, None and a tensor with a dimension too many, alone and with the rest."""
    given = VALID[op]()
    first = {"select_blocks": "index_q", "block_scores": "index_q", "store_kv": "k", "merge_states": "outs"}.get(
        op, "q"
    )
    for name in given:
        for wrong in (3, torch.zeros(3), None, given[name][None], "x"):
            if wrong is None and name in ("block_table", "index_k", "index_k_cache"):
                continue
            text = m3_sparse.explain(op, **{**given, name: wrong})
            if name != first or isinstance(wrong, torch.Tensor):
                assert f"bad input: TypeError: {name}" in text or f"bad input: ValueError: {name}" in text, (
                    name,
                    wrong,
                )
            for other in given:
                m3_sparse.explain(op, **{first: given[first], name: wrong, other: given[other]})
    if "block_table" in given:
        text = m3_sparse.explain(op, **{**given, "block_table": None})
        assert "bad input: ValueError: cu_seqlens_q must have shape [B + 1] with B from the caches" in text


def test_help_is_readable_and_errors_point_at_it():
    text = m3_sparse.explain()
    assert "m3_sparse on cpu" in text and all(
        re.search(rf"^{op} +torch +\S", text, re.MULTILINE) for op in capability.OPERATIONS
    )
    assert "capabilities()" in text and 'backend("aot")' in text
    p = Problem()
    told = m3_sparse.explain("sparse_attention", q=p.q, k_cache=p.k_cache).splitlines()
    column = told[1].index("why not")
    assert told[1].split() == ["backend", "runs", "why", "not"]
    assert all(len(line) <= column or line[column - 1] == " " for line in told[2:-1]), "one column under the other"
    with (
        m3_sparse.backend("aot"),
        pytest.raises(NotImplementedError, match=r'explain\("sparse_attention", ...\) says.*capabilities\(\)'),
    ):
        m3_sparse.sparse_attention(p.q, p.k_cache, p.v_cache, p.ids, p.block_table, **p.lengths)


# ---- the import ----

LOADER = """
import importlib.util, sys
folder = sys.argv[1]
spec = importlib.util.spec_from_file_location("m3_sparse", folder + "/__init__.py", submodule_search_locations=[folder])
module = importlib.util.module_from_spec(spec)
sys.modules["m3_sparse"] = module
"""


def python(code, folder, **environment):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(
        [sys.executable, "-c", LOADER + code, str(folder)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done


def test_import_has_no_side_effects(variant_folder):
    code = """
import threading, torch
before, modules, count = dict(vars(torch.Tensor)), set(sys.modules), len(__import__("os").listdir("/proc/self/task"))
spec.loader.exec_module(module)
assert not torch.cuda.is_initialized()
assert dict(vars(torch.Tensor)) == before
assert threading.active_count() == 1 and len(__import__("os").listdir("/proc/self/task")) == count
new = {m.split(".")[0] for m in set(sys.modules) - modules}
foreign = new & {"transformers", "triton", "cutlass", "numpy", "kernels"}
assert not foreign, foreign
"""
    done = python(code, variant_folder)
    assert done.stdout == "" and done.stderr == ""


def test_environment_forces_a_backend(variant_folder):
    code = """
spec.loader.exec_module(module)
import torch
try:
    module.merge_states(torch.zeros(1, 2, 2, 128), torch.zeros(1, 2, 2))
    print("ran")
except (ValueError, NotImplementedError) as error:
    print(type(error).__name__, error)
"""
    assert python(code, variant_folder, M3_SPARSE_BACKEND="aot").stdout.startswith(
        "NotImplementedError backend 'aot' was asked for"
    )
    assert python(code, variant_folder, M3_SPARSE_BACKEND="gpu").stdout.startswith(
        "ValueError M3_SPARSE_BACKEND must be one of"
    )


def test_public_names():
    for name in m3_sparse.__all__:
        assert hasattr(m3_sparse, name), name
    assert not hasattr(m3_sparse, "sparse_atten_func") and not hasattr(m3_sparse, "flash_attn_varlen_func")
    assert m3_sparse.supports_flash_attn is True


def test_layers_are_pure_and_call_the_public_functions():
    p = Problem()
    for name, layer in vars(m3_sparse.layers).items():
        if isinstance(layer, type) and issubclass(layer, torch.nn.Module):
            own = {n for n in vars(layer) if not n.startswith("__")}
            assert own == {"forward", "has_backward", "can_torch_compile"}, name
    out = m3_sparse.layers.SparseAttention()(p.q, p.k_cache, p.v_cache, p.index_q, p.index_k_cache, *p.tail)
    ids = m3_sparse.select_blocks(p.index_q, p.index_k_cache, p.block_table, **p.lengths)
    assert torch.equal(out, m3_sparse.sparse_attention(p.q, p.k_cache, p.v_cache, ids, p.block_table, **p.lengths))
    dense = m3_sparse.layers.DenseAttention()(p.q, p.k_cache, p.v_cache, *p.tail)
    assert torch.equal(dense, m3_sparse.dense_attention(p.q, p.k_cache, p.v_cache, p.block_table, **p.lengths))


def test_messages_name_a_view_that_is_not_aligned():
    x = torch.zeros(4, 130)
    with pytest.raises(ValueError, match="x must have strides that are multiples of 16 bytes"):
        _arguments.aligned("x", x[:, :128])
    with pytest.raises(ValueError, match="x must start at a multiple of 16 bytes, got a view at byte 4"):
        _arguments.aligned("x", torch.zeros(4, 132)[:, 1:129])
    with pytest.raises(ValueError, match="x must have stride 1"):
        _arguments.aligned("x", torch.zeros(128, 4).T)


def test_variant_holds_what_was_loaded(variant_folder):
    assert Path(m3_sparse.__file__).parent == variant_folder
