"""No access outside of the tensors given or allocated, whatever stands in indices, and every byte of a result written: on a
GPU, where the problems of safety_problems.py run on tensors and workspaces that lie flush against unmapped pages, once with
their last byte and once with their first (edge_allocator.py).

A fault ends the process that runs them; the next one goes on behind it, so each fault names its problem.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

CHILD = Path(__file__).with_name("edge_allocator.py")
COUNT, SECONDS, MOST_FAULTS = 6, 60, 4
FUNCTIONS = ("sparse_attention", "dense_attention", "select_blocks", "block_scores", "store_kv", "merge_states")


def run(folder, count=COUNT, seconds=SECONDS):
    """Records of all problems, in as many processes as it takes."""
    records, first = [], 0
    for _ in range(MOST_FAULTS + 1):
        command = [sys.executable, str(CHILD), str(folder), str(count), str(first), str(seconds)]
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
            try:
                end = subprocess.run(command, stdout=out, stderr=errors, timeout=seconds + 30).returncode
            except subprocess.TimeoutExpired as error:
                end = error
            (out.seek(0), errors.seek(0))
            lines = [json.loads(line) for line in out if line.startswith("{") and line.endswith("}\n")]
            told = errors.read()
        if not lines:
            raise RuntimeError(f"nothing ran, {end}: {told[-3000:]}")
        if lines[-1]["state"] == "run":
            lines.append({**lines[-1], "state": "fault", "text": f"{end}: {told[-1000:]}"})
        records += [line for line in lines if line["state"] != "run"]
        if lines[-1]["state"] != "fault":
            break
        first = lines[-1]["number"] + 1
    return records


def test_the_edges_hold():
    """A written redzone is found, a read past an edge faults."""
    started = {}
    for flush in ("end", "start"):
        command = [sys.executable, str(CHILD), "control", flush]
        started[flush] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for flush, process in started.items():
        out, errors = process.communicate(timeout=120)
        states = [json.loads(line)["state"] for line in out.splitlines() if line.startswith("{")]
        assert states == ["inside", "damaged", "fault"], (flush, out, errors[-2000:])


@pytest.fixture(scope="module")
def records(variant_folder, pytestconfig):
    return run(variant_folder, pytestconfig.getoption("--problems") or COUNT)


def test_all_ran(records, figures):
    states = [r["state"] for r in records]
    figures(
        "NVIDIA GPU",
        problems=len({(r["backend"], r["name"]) for r in records if "name" in r}),
        runs=states.count("ok"),
        faults=states.count("fault"),
        wrong=states.count("failed"),
        allocations=sum(r.get("allocations", 0) for r in records),
        seconds=records[-1].get("seconds"),
    )
    assert records[-1]["state"] == "end", records[-1]


@pytest.mark.parametrize("backend", ["aot", "torch"])
@pytest.mark.parametrize("flush", ["end", "start"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_on_edges(records, function, flush, backend):
    mine = [
        r for r in records if r.get("name", "").startswith(function) and (r["flush"], r["backend"]) == (flush, backend)
    ]
    wrong = [r for r in mine if r["state"] != "ok"]
    assert not wrong, "\n".join(f"{r['name']}: {r['state']}: {r.get('text')}" for r in wrong)
    assert mine
