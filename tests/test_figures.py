"""The measured tables of the documents and the plots are of the committed rows: tools/figures.py, without drawing."""

import json

import figures
import pytest


@pytest.fixture(scope="module")
def rows():
    return json.loads(figures.RESULTS.read_text())


def test_tables_and_plots_are_of_the_committed_rows(rows):
    assert figures.stale(rows) == [], "run python tools/figures.py (needs matplotlib)"
    lines = figures.table(rows).splitlines()[2:]
    assert len(lines) >= 15 and all(line.count(" | ") == 3 for line in lines)


def test_another_figure_makes_them_stale(rows):
    def changed(**key):
        picked = [row for row in rows if all(row[name] == value for name, value in key.items())]
        assert len(picked) == 1
        return figures.stale([{**row, "ms_cold": row["ms_cold"] * 2} if row in picked else row for row in rows])

    shape = {"impl": "ours", "dtype": "bf16", "heads": "64/4", "kv_len": 32768}
    assert changed(op="step", batch=64, **shape) == ["README.md", "CARD.md"]
    assert changed(op="decode", batch=64, q_len=1, **shape) == ["README.md", "CARD.md", "decode"]
    assert changed(op="decode", batch=32, q_len=1, **shape) == []
    peer = {"op": "prefill", "impl": "vllm-triton", "dtype": "fp8", "q_len": 8192, "kv_len": 8192}
    assert changed(**peer, selection="random") == ["prefill"]


def test_the_best_peer_and_what_is_left_out():
    key = {
        "op": "select",
        "dtype": "bf16",
        "heads": "4",
        "batch": 1,
        "q_len": 32768,
        "kv_len": 32768,
        "selection": None,
    }
    row = lambda impl, ms: {**key, "impl": impl, "ms_cold": ms, "limit_ms": 0.5}
    assert figures.table([row("vllm-triton", 2.0)]).count("\n") == 1  # without ours, no line
    found = [row("ours", 0.6761), row("ours, other", 0.1), row("vllm-triton", 2.0), row("flashinfer-cake", 1.7)]
    last = figures.table([*found, row("flashinfer-cake score", 1.0)]).splitlines()[-1]
    assert last == "| prefill selection, 32,768 tokens | 676 us | 500 us | 1.70 ms (FlashInfer) |"
    assert [figures.duration(ms) for ms in (0.0046, 0.0124, 34.62, 1.0)] == ["4.60 us", "12.4 us", "34.6 ms", "1.00 ms"]


def test_a_plot_says_what_it_was_drawn_from(tmp_path):
    path = tmp_path / "plot.svg"
    assert figures.drawn_from(path) is None
    path.write_text(f"<svg>points {'0a' * 12}</svg>")
    assert figures.drawn_from(path) == "0a" * 12
