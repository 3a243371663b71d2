"""No access outside of the tensors given or allocated, whatever stands in indices, and every byte of a result written: the
shipped programs in the PTX emulator. The problems are safety_problems.py's.

Needs `--backend=emulated`. The emulator's table of allocations holds the arguments' own bytes, which are read-only but for
results, and the workspaces, which start as NaN. The tensors lie flush against unmapped pages too.
"""

import itertools

import pytest
from edge_memory import FLUSH, HostEdges
from safety_problems import problems

COUNT = 6  # problems of a kind
SM100_COUNT = 3


def run_all(emulation, count, policies):
    for make, flush, policy in zip(problems(True, count), itertools.cycle(FLUSH), itertools.cycle(policies)):
        problem = make()
        try:
            with emulation.policy(policy):
                problem.run("aot", HostEdges(flush))
        except Exception as error:
            raise AssertionError(f"{problem.name}, {policy}, flush at the {flush}") from error


def test_sm90(emulation):
    run_all(emulation, COUNT, ("eager", "late", "random1"))


@pytest.mark.parametrize("architecture", ["sm_100"])
def test_sm100(emulation, architecture):
    with emulation.device(architecture):
        run_all(emulation, SM100_COUNT, ("eager", "late"))
