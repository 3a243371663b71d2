"""The sweep for compute-sanitizer launches every SM90 program: on the CPU, with recording_driver.c as the
CUDA driver (see launch_checks.py). What it finds on a GPU is in docs/measurements.
"""

import json
import sys

import pytest
from launch_checks import ROOT, LaunchChecks, needs_variant, operators

check = LaunchChecks(__file__)


@check
def launches_every_program(driver):
    sys.path.insert(0, str(ROOT / "tests" / "gpu"))
    from sanitizer_sweep import Sweep

    sweep = Sweep(operators(), "cpu")
    sweep.run()
    index = json.loads((ROOT / "build" / "kernels" / "index.json").read_text())
    expected = {facts["entry"] for facts in index if facts["arch"] == "sm_90a"}
    launched = {launch.entry for launch in driver.launches}
    assert expected == launched, expected ^ launched
    assert sweep.calls < 120, "the sweep is to stay small"


@needs_variant
@pytest.mark.parametrize("name", sorted(check.functions))
def test_sweep(name):
    check.run(name)


if __name__ == "__main__":
    check.main()
