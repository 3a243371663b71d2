"""No access outside of the tensors given, whatever stands in indices, and every byte of a result written: for torch on the
CPU. The problems are safety_problems.py's; their tensors lie flush against unmapped pages.

An access past an edge kills the process; pytest's fault handler then names the test.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from edge_memory import FLUSH, Damaged, EdgeMemory, HostEdges, HostPages
from safety_problems import problems

COUNT = 12  # problems of a kind; --problems N for more


@pytest.mark.parametrize("flush", FLUSH)
def test_on_edges(flush, pytestconfig, figures):
    ran = placed = 0
    for make in problems(False, pytestconfig.getoption("--problems") or COUNT):
        problem, edges = make(), HostEdges(flush)
        try:
            problem.run("torch", edges)
        except Exception as error:
            raise AssertionError(problem.name) from error
        ran, placed = ran + 1, placed + edges.memory.allocated
    figures(f"torch on the CPU, flush at the {flush}", problems=ran, allocations=placed, faults=0)


@pytest.mark.parametrize("flush", FLUSH)
def test_the_edges_themselves(flush):
    memory = EdgeMemory(HostPages(), flush)
    unit = memory.pages.granularity
    for count in (1, 20, unit, unit + 4):
        at = memory.allocate(count)
        low, room, _ = memory.live[at]
        assert at == (low if flush == "start" else low + room - count)
        assert (memory.pages.read(at, count) == 0xFF).all()
        memory.check()
        if room > count:
            outside = at + count if flush == "start" else at - 1
            memory.pages.fill(outside, 1, 0)
            with pytest.raises(Damaged, match="1 bytes changed"):
                memory.check()
        memory.free(at)
        memory.damage.clear()


def test_an_access_past_an_edge_faults():
    code = """if True:
        import sys
        sys.path.insert(0, sys.argv[1])
        from edge_memory import EdgeMemory, HostPages
        import ctypes
        memory = EdgeMemory(HostPages(), sys.argv[2])
        at = memory.allocate(20)
        ctypes.string_at(at, 20)
        print("inside", flush=True)
        ctypes.string_at(at + 20 if sys.argv[2] == "end" else at - 1, 1)
        print("outside", flush=True)"""
    for flush in FLUSH:
        command = [sys.executable, "-c", code, str(Path(__file__).parent), flush]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.stdout.split() == ["inside"] and done.returncode == -11
