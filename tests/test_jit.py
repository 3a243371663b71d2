"""The backend "jit" where nothing can be compiled or launched: what it needs, and that it says so. That it computes is
tests/test_emulated_jit.py."""

import importlib.metadata

import pytest
import torch

import m3_sparse
from m3_sparse import _jit


def test_each_requirement_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(_jit, "SOURCES", tmp_path / "none")
    assert "contains no kernel sources" in _jit.missing("merge_states")
    monkeypatch.setattr(_jit, "SOURCES", tmp_path)
    installed = set()

    def version(package):
        if package not in installed:
            raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert "pip install nvidia-cutlass-dsl" in _jit.missing("merge_states")
    installed.add("nvidia-cutlass-dsl")
    assert _jit.missing("merge_states") is None
    assert "dense_attention on jit needs flash-attn-4" in _jit.missing("dense_attention")
    installed.add("flash-attn-4")
    assert _jit.missing("dense_attention") is None


def test_it_is_never_the_default_and_refuses_by_name():
    outs, lses = torch.randn(2, 3, 1, 128), torch.randn(2, 3, 1)
    assert "-> torch, by default" in m3_sparse.explain("merge_states", outs=outs, lses=lses)
    with m3_sparse.backend("jit"), pytest.raises(NotImplementedError, match="merge_states on jit runs on sm_90"):
        m3_sparse.merge_states(outs, lses)


def test_the_compiler_s_error_is_shown(monkeypatch, tmp_path):
    (tmp_path / "export.py").write_text("raise SystemExit('no such target')")
    monkeypatch.setattr(_jit, "SOURCES", tmp_path)
    with pytest.raises(RuntimeError, match="(?s)could not compile decode_x_sm90a:.*no such target"):
        _jit._compile("decode", "decode_x_sm90a", tmp_path)
