"""Checks of what the extension's launcher packs, each in a process of its own with recording_driver.c as the CUDA driver.

A test file makes one `LaunchChecks(__file__)`, decorates its checks with it, runs them by `run` from its pytest functions
and ends with `check.main()` under `if __name__ == "__main__"`: the process started by `run` is the file itself.
"""

import importlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
VARIANTS = sorted((ROOT / "build").glob("torch-stable-abi*-linux"))
needs_variant = pytest.mark.skipif(not VARIANTS, reason="the CUDA variant isn't built (python tools/build.py cuda)")


class LaunchChecks:
    """The checks of one file by name. A check takes the driver, or None if it was registered with `without_driver`."""

    def __init__(self, file):
        self.file = file
        self.functions = {}
        self.driverless = set()

    def __call__(self, function):
        self.functions[function.__name__] = function
        return function

    def without_driver(self, function):
        self.driverless.add(function.__name__)
        return self(function)

    def run(self, *names):
        """Run checks one after the other in one new process; fails with that process's output."""
        done = subprocess.run([sys.executable, self.file, *names], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == list(names)

    def main(self):
        from recording_driver import RecordingDriver

        names = sys.argv[1:]
        index = json.loads((ROOT / "build" / "kernels" / "index.json").read_text())
        with tempfile.TemporaryDirectory() as folder:
            driver = None
            if not self.driverless.intersection(names):
                driver = RecordingDriver(Path(folder), {facts["entry"]: facts for facts in index})
            for name in names:
                self.functions[name](driver)
                print(name)


def operators():
    """The namespace of the built extension's operators, without the Python package around it."""
    import torch

    [extension] = VARIANTS[0].glob("*.abi3.so")
    sys.path.insert(0, str(VARIANTS[0]))
    name = extension.name.partition(".")[0]
    importlib.import_module(name)
    return getattr(torch.ops, name)


def attention_problem(
    q="bfloat16", kv="bfloat16", tokens=3, batch=2, heads=(32, 2), pages=5, page=128, width=4, topk=16
):
    """Positional arguments of the operator sparse_attention, contiguous; `width` is the page table's."""
    import torch

    qt, kt = getattr(torch, q), getattr(torch, kv)
    query = torch.zeros(tokens, heads[0], 128, dtype=qt)
    k_cache, v_cache = (torch.zeros(pages, heads[1], page, 128, dtype=torch.float32).to(kt) for _ in range(2))
    ids = torch.zeros(tokens, heads[1], topk, dtype=torch.int32)
    table = torch.zeros(batch, width, dtype=torch.int32)
    cu, used = torch.zeros(batch + 1, dtype=torch.int32), torch.zeros(batch, dtype=torch.int32)
    out, lse = torch.empty_like(query), torch.empty(tokens, heads[0])
    return [out, lse, query, k_cache, v_cache, ids, table, cu, used, 0.25, True, None, None]


def error_of(call, *arguments):
    """The text of the RuntimeError that a call must raise."""
    try:
        call(*arguments)
    except RuntimeError as error:
        return str(error)
    raise AssertionError("no error was raised")
