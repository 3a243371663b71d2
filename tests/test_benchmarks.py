"""The benchmark files as plain scripts and as files of `kernels benchmark`, and the rows that they write.

What they time needs a GPU; here the tool runs every class on the torch backend and verifies its answers. The benchmark
modules are loaded in processes of their own, since they import each other by bare names.
"""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted((ROOT / "benchmarks").glob("benchmark*.py"))
KEY = ["op", "impl", "dtype", "heads", "batch", "q_len", "kv_len", "selection", "page", "device", "backend"]
FIELDS = [*KEY, "ms_cold", "ms_warm", "limit_ms", "bytes", "flops", "commit", "date"]
OPS = {"decode", "select", "store", "step", "prefill", "dense", "merge", "layer", "tensor_parallel"}


def run(code, *arguments, cwd=ROOT):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_kernels_benchmark_runs_and_verifies_every_script(tmp_path, cpu_variant):
    """With the tool's own discovery, kernel loading, tolerance and timing, on a local repository."""
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / cpu_variant.name).symlink_to(cpu_variant)
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    out = run(
        """
        import json, sys
        from pathlib import Path
        from kernels.cli import benchmark

        repo = Path(sys.argv[1])
        found = {}
        for script in benchmark.discover_benchmark_scripts(str(repo), repo):
            options = dict(iterations=1, warmup=0, cwd=repo, repo_id=str(repo), is_local=True, revision="local")
            results, _ = benchmark.run_benchmark_script(script, **options)
            found[script.name] = {name: timing.verified for name, timing in results.items()}
        print("FOUND " + json.dumps(found))
        """,
        tmp_path,
    )
    found = json.loads(out[out.index("FOUND ") + 6 :])
    assert list(found) == [path.name for path in SCRIPTS]
    for name, workloads in found.items():
        assert workloads and all(verified is True for verified in workloads.values()), (name, workloads)


def test_every_script_starts_without_the_kernels_package():
    out = run(
        """
        import runpy, sys

        sys.modules["kernels"] = None
        for script in sys.argv[1:]:
            sys.argv = [script, "--help"]
            try:
                runpy.run_path(script, run_name="__main__")
            except SystemExit as end:
                assert end.code in (0, None), end.code
        """,
        *SCRIPTS,
    )
    assert out.count("--variant") >= len(SCRIPTS)


def test_peers_are_optional():
    code = """
    import sys
    sys.path.insert(0, "benchmarks")
    for name in ("flashinfer", "vllm"):
        sys.modules[name] = None
    import torch, peers
    assert peers.importable() == [] and peers.attention(torch.float8_e4m3fn) == peers.selection(torch.bfloat16) == []
    good, bad = peers.Peer("good", None), peers.Peer("bad", None)
    timed = peers.each([bad, good], None, lambda peer: (1.0, 2.0) if peer is good else 1 / 0)
    assert timed == [("good", (1.0, 2.0))] and peers.each([good], ["other"], None) == peers.each([good], [], None) == []
    print("over")
    """
    out = run(code)
    assert out.startswith("bad: ZeroDivisionError") and out.endswith("over\n")


def test_rows_are_merged_by_key(tmp_path):
    """A new figure replaces the one of the same key; every row has the same fields in the same order."""
    variant = tmp_path / "variant"
    variant.mkdir()
    (variant / "__init__.py").write_text("")
    provenance = {"kernel": {"commit": "0123456789", "dirty": False}}
    (variant / "metadata.json").write_text(json.dumps({"provenance": provenance}))
    code = """
    import sys
    from pathlib import Path
    sys.path.insert(0, "benchmarks")
    import protocol
    protocol.load(sys.argv[1])
    row = lambda cold, **key: protocol.row(4000.0, cold, cold / 2, 8_000_000, 5, op="decode", dtype="fp8", device="x", **key)
    path = Path(sys.argv[1]) / "rows.json"
    protocol.merge_rows(path, [row(9.0, impl="ours", batch=1), row(7.0, impl="peer", batch=1)])
    protocol.merge_rows(path, [row(3.0, impl="ours", batch=1), row(4.0, impl="ours", batch=2)])
    """
    run(code, variant)
    rows = json.loads((variant / "rows.json").read_text())
    assert [list(row) for row in rows] == [FIELDS] * 3
    assert [(r["impl"], r["batch"], r["ms_cold"]) for r in rows] == [
        ("ours", 1, 0.003),
        ("ours", 2, 0.004),
        ("peer", 1, 0.007),
    ]
    assert rows[0]["limit_ms"] == 0.002 and rows[0]["commit"] == "0123456" and rows[0]["selection"] is None


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "results").glob("*.json")), ids=lambda p: p.name)
def test_committed_rows(path):
    rows = json.loads(path.read_text())
    keys = [tuple(row[name] for name in KEY) for row in rows]
    assert len(set(keys)) == len(keys)
    for row in rows:
        # How much neighbouring queries' selections overlap decides a prefill's time: benchmarks/selections.py.
        fields = [*FIELDS, "u4"] if row["op"] == "prefill" else FIELDS
        assert list(row) == fields and row["op"] in OPS and row["ms_cold"] > 0 and row["limit_ms"] >= 0
        ours = row["impl"].startswith("ours") or row["op"] == "tensor_parallel"
        assert row["device"].startswith("NVIDIA") and row["backend"] == ("aot" if ours else None)
        assert not row["commit"].endswith("-dirty"), "measured on sources that no commit holds"


def test_the_layer_benchmark_on_the_cpu(cpu_variant):
    """At a small size: its checks, and the stock path's need."""
    pytest.importorskip("transformers.models.minimax_m3_vl")
    script = ROOT / "benchmarks" / "benchmark_layer.py"
    options = ["--variant", str(cpu_variant), "--device", "cpu", "--tokens", "2300", "--hidden", "64"]
    done = subprocess.run([sys.executable, str(script), *options], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    first, layer, stock = done.stdout.splitlines()
    assert "rows of 2300 tokens right" in first and layer.startswith("layer bf16 2300 tokens, hidden 64: select ")
    assert "scores [1, 4, 2300, 2300] 0.1 GiB, bf16 mask [1, 64, 2300, 2300] 0.6 GiB" in stock
