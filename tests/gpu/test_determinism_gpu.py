"""The README's table of what changes a result's bits on a GPU: every cell with plain calls and with replays of CUDA graphs."""

import determinism_checks as checks
import oracle
import pytest
import torch
from determinism_table import WAYS

# Where the table promises no bits, and these problems show why.
SEEN = {("sparse/kv_stationary", "selection"), ("dense/default", "cut"), ("sparse/default", "batch")}
COMPILED = torch.cuda.is_available() and torch.cuda.get_device_capability() in ((9, 0), (10, 0), (10, 3))

pytestmark = pytest.mark.skipif(not COMPILED, reason="the kernels are compiled for SM90, SM100 and SM103")


def eager(function):
    function()


def graph(function):
    """The second replay of the function's graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    stream.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        function()
    captured.replay()
    captured.replay()
    torch.cuda.synchronize()


MODES = {"eager": eager, "graph": graph}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way, change", checks.cells("aot"), ids=lambda x: x.replace(" ", "_"))
def test_aot(way, change, mode):
    differs = checks.check(way, change, "large", MODES[mode], "aot on a GPU", "cuda")
    print(f"{way}, {change}, {mode}: {'other' if differs else 'same'} bits")
    assert differs or (way, change) not in SEEN


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way, change", checks.cells("torch"), ids=lambda x: x.replace(" ", "_"))
def test_torch(way, change, mode):
    differs = checks.check(way, change, "large", MODES[mode], "torch on a GPU", "cuda")
    print(f"{way}, {change}, {mode}: {'other' if differs else 'same'} bits")


@pytest.mark.parametrize("way", [way for way in WAYS if not way.endswith("/torch")], ids=lambda x: x.replace(" ", "_"))
def test_a_graph_has_the_bits_of_a_call(way):
    problem = checks.Problem(way, "large", "cuda")
    results = [checks.computed(problem, execute, lambda f: f) for execute in MODES.values()]
    for one, other in zip(*results):
        oracle.check_bitwise(one, other, way)
