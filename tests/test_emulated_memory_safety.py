"""No access outside of the tensors given or allocated, whatever stands in indices, and every byte of a result written: the
shipped programs in the PTX emulator. The problems are safety_problems.py's.

Needs `--backend=emulated`. The emulator's table of allocations holds the arguments' own bytes, which are read-only but for
results, and the workspaces, which start as NaN. The tensors lie flush against unmapped pages too.
"""

import itertools

import pytest
from edge_memory import FLUSH, HostEdges
from safety_problems import problems

COUNTS = {"sm_90": 6, "sm_100": 3}  # problems of a kind; --problems N for more
POLICIES = {"sm_90": ("eager", "late", "random1"), "sm_100": ("eager", "late")}


@pytest.mark.parametrize("architecture", COUNTS)
def test_on_edges(emulation, architecture, pytestconfig, figures):
    count = pytestconfig.getoption("--problems") or COUNTS[architecture]
    ran = placed = 0
    launched = len(emulation.driver.results)
    turns = zip(problems(True, count), itertools.cycle(FLUSH), itertools.cycle(POLICIES[architecture]))
    with emulation.device(architecture):
        for make, flush, policy in turns:
            problem, edges = make(), HostEdges(flush)
            try:
                with emulation.policy(policy):
                    problem.run("aot", edges)
            except Exception as error:
                raise AssertionError(f"{problem.name}, {policy}, flush at the {flush}") from error
            ran, placed = ran + 1, placed + edges.memory.allocated
    launches = len(emulation.driver.results) - launched
    figures(f"emulated {architecture}", problems=ran, launches=launches, allocations=placed, faults=0)
