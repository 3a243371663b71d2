"""The quick part of `make lint` (tools/lint.py): ruff and mypy. clang-tidy and both compilers' warnings take minutes."""

import importlib.util
import shutil

import lint
import pytest

installed = shutil.which(lint.tool("ruff")) and importlib.util.find_spec("mypy")
pytestmark = pytest.mark.skipif(not installed, reason="ruff and mypy of requirements-test.txt are not installed")


@pytest.mark.parametrize("name", ["ruff", "format", "mypy"])
def test_clean(name):
    assert lint.CHECKS[name]() == ""


def test_a_problem_is_shown(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("import os\n")
    assert "F401" in lint.run(lint.tool("ruff"), "check", "--output-format=concise", bad)
