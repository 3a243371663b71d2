"""tests/mutation.py works: every fault of its list can be applied, a few are noticed, and its page is what it writes."""

import json
import subprocess
import sys
from pathlib import Path

import harmless_faults
import mutants
import mutation
import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("mutant", mutants.ALL, ids=lambda mutant: mutant.fault)
def test_the_fault_can_still_be_applied(mutant):
    text = (ROOT / "torch-ext" / mutant.file).read_text()
    assert mutation.edited(text, mutant) != text
    for test in mutant.tests if mutant.file.endswith(".py") else mutant.tests[1:]:
        file, _, name = test.partition("::") if mutant.file.endswith(".py") else (f"tests/{mutant.tests[0]}", "", test)
        assert f"def {name}" in (ROOT / file).read_text(), test


def test_there_are_enough_faults_and_no_two_of_a_name():
    assert len({mutant.fault for mutant in mutants.ALL}) == len(mutants.ALL) >= 60


def test_a_few_faults_are_noticed():
    command = [sys.executable, str(ROOT / "tests" / "mutation.py"), "--smoke"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    count = len(mutants.SMOKE)
    assert done.returncode == 0 and f"{count} of {count} faults noticed" in done.stdout, done.stdout + done.stderr


def test_an_unnoticed_fault_is_a_survivor(tmp_path):
    import build
    from project import load_project

    harmless = mutants.python(
        "none", "reference.py", "# ---- scores and selection ----", "# nothing", "tests/test_union.py"
    )
    variant = build.build_cpu(load_project(), ROOT / "build")
    assert mutation.judge_python(harmless, variant, tmp_path) == mutation.SURVIVED


def test_the_page_is_made_of_the_results():
    results = json.loads(mutation.RESULTS.read_text())
    assert mutation.PAGE.read_text() == mutation.page(results)
    assert {row["fault"] for row in results["sources"]} == {mutant.fault for mutant in mutants.ALL}
    assert all(row["verdict"] == mutation.KILLED for row in results["sources"])


def test_each_fault_of_a_kernel_is_noticed_or_declared_harmless():
    kernels = json.loads(mutation.RESULTS.read_text())["kernels"]
    assert all(mutation.settled(found) for found in kernels.values())
    reasons = {fault["harmless"] for found in kernels.values() for fault in found["harmless"]}
    assert reasons == {entry.why for entry in harmless_faults.HARMLESS}
