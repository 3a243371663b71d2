"""The smoke cases on the oldest supported transformers and on the newest that PyPI has.

Each version goes into a folder of its own, build/overlays/<version>, with those of its requirements that the running
environment doesn't meet; the folder is put before the environment's packages. torch stays the environment's.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
OVERLAYS = ROOT / "build" / "overlays"
OLDEST = "5.13.0"
# The version before, whose MiniMax-M3 is there but can't be served.
UNSUPPORTED = "5.12.1"
# Taken for the newest where pip answers without naming one: its `index` command is experimental.
KNOWN = "5.24.0"
# pip's words where PyPI gives no answer; it then finds no distribution of what PyPI does have.
UNREACHABLE = re.compile(
    "Failed to establish|Temporary failure|Connection refused|Max retries|timed out|Network is unreachable"
    "|No matching distribution found for transformers(==[0-9.]+)?$",
    re.MULTILINE,
)


def pip(*arguments):
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if run.returncode:
        if UNREACHABLE.search(run.stdout + run.stderr):
            pytest.skip(f"PyPI can't be reached: pip {arguments[0]} failed with {run.stderr.strip().splitlines()[-1]}")
        pytest.fail(f"pip {' '.join(arguments)} failed:\n{run.stdout}{run.stderr}")
    return run.stdout


def newest():
    match = re.search(r"Available versions: ([^\s,]+)", pip("index", "versions", "transformers"))
    if match is None:
        warnings.warn(f"pip names no version of transformers; taking {KNOWN} for the newest", stacklevel=1)
    return match[1] if match else KNOWN


def overlay(version):
    """The folder with this transformers, installed if it isn't there yet."""
    target = OVERLAYS / version
    if not target.exists():
        OVERLAYS.mkdir(parents=True, exist_ok=True)
        # Renamed when complete: an interrupted installation is not taken for a finished one.
        staging = Path(tempfile.mkdtemp(prefix=f".{version}.", dir=OVERLAYS))
        try:
            install(staging, [f"transformers=={version}"])
            staging.rename(target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return target


def install(target, wanted):
    pip("install", "--quiet", "--no-deps", "--target", str(target), *wanted)
    while missing := unmet(target):
        pip("install", "--quiet", "--no-deps", "--upgrade", "--target", str(target), *missing)


def unmet(target):
    """Requirements of the packages in `target` that neither it nor the environment meets."""
    installed = {canonical(d.name): d for d in metadata.distributions(path=[str(target)])}
    missing = {}
    for distribution in installed.values():
        for requirement in map(Requirement, distribution.requires or ()):
            name = canonical(requirement.name)
            if name == "torch" or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
                continue
            found = installed[name].version if name in installed else environment_version(name)
            if found is None or not requirement.specifier.contains(found, prereleases=True):
                missing[name] = f"{requirement.name}{requirement.specifier}"
    return list(missing.values())


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def environment_version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def run_with(version, *arguments):
    folder = overlay(version)
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    return run, run.stdout + run.stderr


@pytest.mark.parametrize("which", ["oldest", "newest"])
def test_smoke(which, variant_folder):
    version = OLDEST if which == "oldest" else newest()
    run, output = run_with(version, "tests/smoke_transformers.py", str(variant_folder))
    assert run.returncode == 0, output
    lines = run.stdout.splitlines()
    assert lines[0] == f"transformers {version}"
    assert len([line for line in lines if line.endswith(" ok")]) == 8


UNSUPPORTED_SCRIPT = """
import sys
sys.path.insert(0, "tests")
import transformers
from smoke_transformers import import_package
import_package(sys.argv[1])
try:
    sys.modules["m3_sparse"].register_transformers()
except NotImplementedError as error:
    print(error)
"""


def test_unsupported_version_is_named(variant_folder):
    run, output = run_with(UNSUPPORTED, "-c", UNSUPPORTED_SCRIPT, str(variant_folder))
    assert run.returncode == 0, output
    assert "transformers 5.13.0 or newer" in run.stdout and f"found transformers {UNSUPPORTED}" in run.stdout
