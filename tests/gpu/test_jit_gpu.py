"""The backend "jit" on a GPU: the same bits as `aot`, and a second call with other lengths compiles nothing."""

import jit_calls
import pytest
import torch

import m3_sparse
from m3_sparse import _jit


@pytest.mark.parametrize("name", jit_calls.CALLS)
def test_same_bits_as_aot_and_compiled_once(name):
    if reason := _jit.missing("dense_attention" if name == "dense" else "sparse_attention"):
        pytest.skip(reason)
    call, before = jit_calls.CALLS[name], len(_jit.compiled)
    problems = jit_calls.problems("cuda")
    with m3_sparse.backend("jit"):
        got = [call(problems[0])]
        made = _jit.compiled[before:]
        assert made
        got.append(call(problems[1]))
    assert _jit.compiled[before:] == made
    with m3_sparse.backend("aot"):
        for case, results in zip(problems, got):
            for result, want in zip(results, call(case)):
                assert torch.equal(result, want)


def test_in_a_graph():
    if reason := _jit.missing("merge_states"):
        pytest.skip(reason)
    outs, lses = torch.randn(3, 4, 2, 128, device="cuda"), torch.randn(3, 4, 2, device="cuda")
    with m3_sparse.backend("jit"):
        want, _ = m3_sparse.merge_states(outs, lses)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got, _ = m3_sparse.merge_states(outs, lses)
    got.fill_(float("nan"))
    graph.replay()
    assert torch.equal(got, want)
