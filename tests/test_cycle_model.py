"""benchmarks/cycle_model.py: it may print figures for a B200 only while it says what an H200 was measured to do."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tools")]

import cycle_model  # noqa: E402
import machine_code  # noqa: E402

COUNTED = json.loads(cycle_model.COUNTS.read_text())


def test_it_predicts_the_h200_within_20_percent():
    results = cycle_model.check(COUNTED)
    assert {name.split()[0] for name, _, _ in results} == {"decode", "dense", "prefill", "select"} and len(
        results
    ) >= 50
    for name, measured, predicted in results:
        assert abs(predicted / measured - 1) <= cycle_model.TOLERANCE, (name, measured, predicted)


def test_wrong_rates_are_noticed():
    """The check is no formality: without overlap, or with another rate of a unit, it fails."""
    for change in ({"matrix": 1000.0}, {"memory": 3.2}, {"l2_reads": 3.0, "l2_writes": 1.3}, {"launch": 12.0}):
        card = cycle_model.Card(**{**cycle_model.H200.__dict__, **change})
        wrong = 0
        for row, kernel, arguments in cycle_model.h200_problems():
            predicted = cycle_model.predict(card, kernel, COUNTED, **arguments)
            wrong += abs(predicted / (row["ms_cold"] * 1e3) - 1) > cycle_model.TOLERANCE
        assert wrong, change


def test_no_prediction_where_the_check_fails(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["cycle_model.py", "--b200"])
    monkeypatch.setattr(cycle_model, "check", lambda counts: [("a problem", 100.0, 130.0)])
    with pytest.raises(SystemExit, match="does not hold"):
        cycle_model.main()
    assert "B200" not in capsys.readouterr().out


def test_the_document_has_the_predictions():
    """`python benchmarks/cycle_model.py --b200 --write docs/sm100.md` renews them."""
    assert cycle_model.b200_table(COUNTED) in (ROOT / "docs" / "sm100.md").read_text()


def test_counts_are_those_of_the_build():
    """`python benchmarks/cycle_model.py --count` renews them."""
    program, kernels = machine_code.disassembler(), ROOT / "build" / "kernels"
    if program is None or not (kernels / "index.json").exists():
        pytest.skip("needs nvdisasm and the exported kernels")
    found = cycle_model.count(kernels, program)
    assert found.keys() == COUNTED.keys()
    for kernel in [kernel for kernel in cycle_model.LOOPS if kernel in found]:
        for pipe, n in cycle_model.cycles(kernel, found).items():
            assert n == pytest.approx(cycle_model.cycles(kernel, COUNTED)[pipe], rel=0.1, abs=20), (kernel, pipe)
