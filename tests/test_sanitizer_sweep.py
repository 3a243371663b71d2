"""The sweep for compute-sanitizer launches every SM90 program: on the CPU, with recording_driver.c as the
CUDA driver (see launch_checks.py). What it finds on a GPU is in docs/measurements.
"""

import json
import sys

import pytest
from launch_checks import ROOT, LaunchChecks, needs_variant, operators

check = LaunchChecks(__file__)


sys.path.insert(0, str(ROOT / "tests" / "gpu"))
from sanitizer_sweep import Sweep, largest_cluster  # noqa: E402


@check
def launches_every_program(driver):
    sweep = Sweep(operators(), "cpu")
    sweep.run()
    index = json.loads((ROOT / "build" / "kernels" / "index.json").read_text())
    expected = {facts["entry"] for facts in index if facts["arch"] == "sm_90a"}
    launched = {launch.entry for launch in driver.launches}
    assert expected == launched, expected ^ launched
    assert sweep.calls < 120, "the sweep is to stay small"
    assert not sweep.left_out


@check
def leaves_out_large_clusters_only(driver):
    limit = largest_cluster("synccheck", "Version 2025.3.1.0 (build 36398880) (public-release)")
    assert largest_cluster("synccheck", "Version 2026.4.0.0 (build 39022338) (public-release)") == 16
    Sweep(operators(), "cpu").run()
    kept = [launch.entry for launch in driver.launches if launch.cluster <= limit]
    assert 0 < len(kept) < len(driver.launches)
    driver.launches.clear()
    sweep = Sweep(operators(), "cpu", largest_cluster=limit)
    sweep.run()
    assert [launch.entry for launch in driver.launches] == kept
    assert len(sweep.left_out) == 5


@needs_variant
@pytest.mark.parametrize("name", sorted(check.functions))
def test_sweep(name):
    check.run(name)


if __name__ == "__main__":
    check.main()
