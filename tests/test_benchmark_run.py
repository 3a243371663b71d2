"""benchmarks/run.py: a smoke run of every benchmark that is interrupted and goes on, and what counts as a regression.

The script runs in processes of its own: benchmark modules import each other by bare names.
"""

import json
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "benchmarks" / "run.py"
OPS = {"decode", "dense", "layer", "merge", "prefill", "score", "select", "step", "store", "tensor_parallel"}


def command(*options):
    return [sys.executable, str(SCRIPT), *map(str, options)]


def interrupted(options, state, least):
    """Runs until `least` parts are done, then as Ctrl-C does; the names of the done ones."""
    process = subprocess.Popen(command(*options), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    done, limit = [], time.monotonic() + 200
    while len(done) < least and process.poll() is None and time.monotonic() < limit:
        time.sleep(0.02)
        done = json.loads(state.read_text())["done"] if state.exists() else []
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=100)
    assert process.returncode not in (0, 1, 2), out
    return json.loads(state.read_text())["done"]


def test_a_smoke_run_of_every_benchmark_goes_on_after_an_interruption(tmp_path, cpu_variant):
    """On this machine, whatever it has; the time a quiet one with two cores takes is in docs/benchmarks.md."""
    pytest.importorskip("transformers.models.minimax_m3_vl")
    results = tmp_path / "smoke.json"
    state, running = (tmp_path / f"smoke.json.{what}" for what in ("state", "running"))
    options = ["--smoke", "--variant", cpu_variant, "--results", results]
    done = interrupted(options, state, 3)
    assert len(done) >= 3 and not results.exists()
    first = {json.dumps(row) for row in json.loads(running.read_text())}

    whole = subprocess.run(command(*options), capture_output=True, text=True, timeout=300)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    assert f"going on after {len(done)} of " in whole.stdout and not state.exists() and not running.exists()
    rows = json.loads(results.read_text())
    assert {row["op"] for row in rows} == OPS and first <= {json.dumps(row) for row in rows}  # none was run again
    for row in rows:
        assert row["impl"] == "ours" and row["ms_cold"] > 0 and row["limit_ms"] > 0
        if row["backend"] == "torch":
            assert row["device"].startswith(("CPU", "NVIDIA"))
    lines = [line for line in whole.stdout.splitlines() if " | " in line]
    assert len(lines) == len(rows) + 1 and "% of limit" in lines[0]

    # Against itself with every stored time a hundredth: each row that has more than a microsecond is a regression.
    stored = tmp_path / "stored.json"
    stored.write_text(json.dumps([{**row, "ms_cold": row["ms_cold"] / 100} for row in rows]))
    options += ["--only", "store", "--against", stored]
    again = subprocess.run(command(*options), capture_output=True, text=True, timeout=300)
    assert again.returncode == 1 and again.stdout.count("REGRESSION store ours") == 2, again.stdout
    assert len(json.loads(results.read_text())) == len(rows)  # replaced, not added


def test_parts_states_and_regressions(tmp_path):
    code = """
    import json, sys
    from pathlib import Path
    sys.path.insert(0, "benchmarks")
    import protocol, run

    folder = Path(sys.argv[1])
    protocol.variant_commit = lambda: "0123456"
    tried = []
    def part(name, error=None):
        def work(results):
            tried.append(name)
            if error:
                raise error
            row = protocol.row(1.0, 5.0, 5.0, 10, 10, op=name, impl="ours", device="d")
            protocol.merge_rows(results, [row])
        return run.Part(name, work)

    results = folder / "rows.json"
    results.write_text(json.dumps([protocol.row(1.0, 9.0, 9.0, 1, 1, op=op, impl="ours", device="d") for op in "ax"]))
    rows, failed = run.sweep([part("a"), part("b", ValueError("no")), part("c")], results, "v1")
    assert tried == ["a", "b", "c"] and failed == {"b": "ValueError: no"}  # a failure doesn't stop the others
    assert [row["op"] for row in rows] == ["a", "c"]  # the run's own alone
    assert {row["op"]: row["ms_cold"] for row in json.loads(results.read_text())} == {"a": 0.005, "c": 0.005, "x": 0.009}
    try:
        run.sweep([part("a")], results, "v2")
        raise AssertionError("another variant's state was taken")
    except SystemExit as refused:
        assert "--restart" in str(refused)
    rows, failed = run.sweep([part("a"), part("b"), part("c")], results, "v1")
    assert tried[3:] == ["b"] and not failed and len(rows) == 3  # the failed one alone
    assert [path.name for path in folder.iterdir()] == ["rows.json"]
    rows, _ = run.sweep([part("c")], results, "v2")
    assert [row["op"] for row in rows] == ["c"]

    def row(us, **key):
        key = {"op": "o", "impl": "ours", "device": "d", **key}
        return protocol.row(1.0, us, us, 1, 1, **key)
    def slower(new, old, threshold=15):
        found, compared = run.regressions([new], [old], threshold)
        return len(found), compared
    assert slower(row(116.0), row(100.0)) == (1, 1) and slower(row(114.0), row(100.0)) == (0, 1)
    assert slower(row(114.0), row(100.0), 10) == (1, 1) and slower(row(50.0), row(100.0)) == (0, 1)
    assert slower(row(1.9), row(1.0)) == (0, 1)  # less than a microsecond
    assert slower(row(900.0), row(100.0, device="e")) == slower(row(900.0, backend="torch"), row(100.0)) == (0, 0)
    assert slower(row(900.0, impl="peer"), row(100.0, impl="peer")) == (0, 0)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_parts_of_a_whole_run():
    """Every script has a part; the cases, which are no part of the repository, when they are given."""
    listed = lambda *options: subprocess.run(
        command("--list", *options), capture_output=True, text=True, timeout=100, check=True
    ).stdout.splitlines()
    names = listed("--decode-cases", "d.json", "--prefill-cases", "p.json")
    assert {"step", "store", "merge", "decode", "dense", "prefill curve", "prefill cases", "decode cases"} < set(names)
    assert listed("--only", "prefill") == ["prefill", "prefill curve"]
