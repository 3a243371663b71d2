"""tests/mutation.py works: every fault of its list can be applied, a few are noticed, and its page is what it writes."""

import json
import subprocess
import sys
from pathlib import Path

import harmless_faults
import kernel_mutants
import mutants
import mutation
import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("mutant", mutation.ALL, ids=lambda mutant: mutant.fault)
def test_the_fault_can_still_be_applied(mutant):
    kind = mutation.kind(mutant)
    text = (ROOT / ("" if kind == "kernels" else "torch-ext") / mutant.file).read_text()
    assert mutation.edited(text, mutant) != text
    assert bool(mutant.programs) == (kind == "kernels")
    for test in mutant.tests if kind != "cpp" else mutant.tests[1:]:
        file, _, name = test.partition("::") if kind != "cpp" else (f"tests/{mutant.tests[0]}", "", test)
        assert f"def {name.partition('[')[0]}" in (ROOT / file).read_text(), test


def test_there_are_enough_faults_and_no_two_of_a_name():
    assert len({mutant.fault for mutant in mutation.ALL}) == len(mutation.ALL) >= 100


def test_every_kernel_file_has_a_fault():
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "kernel-src").glob("[ns]*/*.py")}
    files = {name for name in files if "/shared/" not in name and not name.endswith("__init__.py")}
    assert files == {mutant.file for mutant in kernel_mutants.ALL if "/shared/" not in mutant.file}


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
    assert {row["fault"] for row in results["sources"]} == {mutant.fault for mutant in mutation.ALL}
    assert all(row["verdict"] == mutation.KILLED for row in results["sources"])


def test_each_fault_of_a_kernel_is_noticed_or_declared_harmless():
    kernels = json.loads(mutation.RESULTS.read_text())["kernels"]
    assert all(mutation.settled(found) for found in kernels.values())
    reasons = {fault["harmless"] for found in kernels.values() for fault in found["harmless"]}
    assert reasons == {entry.why for entry in harmless_faults.HARMLESS}
