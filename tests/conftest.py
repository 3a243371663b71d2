"""Builds the variant under test and makes it importable as `m3_sparse`; skips what needs a GPU where there is none."""

import importlib.abc
import importlib.util
import json
import os
import sys
from pathlib import Path

# The suite's tensors are small and its workers share the cores; one thread each is the fastest.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import build  # noqa: E402
import cuda_extension  # noqa: E402
import property_settings  # noqa: E402
from project import load_project  # noqa: E402

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


class VariantFinder(importlib.abc.MetaPathFinder):
    """Finds `m3_sparse` in a variant folder, whose own name can't be imported; builds torch-cpu when none was given."""

    def __init__(self, folder):
        self.folder = Path(folder).resolve() if folder else None

    def find_spec(self, name, path=None, target=None):
        if name != "m3_sparse":
            return None
        if self.folder is None:
            self.folder = build.build_cpu(load_project(), ROOT / "build")
        return importlib.util.spec_from_file_location(
            name, self.folder / "__init__.py", submodule_search_locations=[str(self.folder)]
        )


def pytest_addoption(parser):
    parser.addoption("--variant", metavar="FOLDER", help="test this built variant (default: build/torch-cpu, rebuilt)")
    parser.addoption(
        "--backend",
        choices=["emulated"],
        help="run tests/test_emulated_*.py: the public functions on CPU tensors, executed by the PTX emulator; needs "
        "--variant with the CUDA variant",
    )
    parser.addoption("--witnesses", action="store_true", help="compile and run upstream kernels that take minutes")
    parser.addoption(
        "--faults", action="store_true", help="break the large programs too (tests/test_emulated_faults.py)"
    )
    parser.addoption(
        "--examples",
        type=int,
        metavar="N",
        help="property tests: draw N examples of all operations together (default: a few hundred)",
    )
    parser.addoption(
        "--property-seed", type=int, metavar="S", help="property tests: other draws than the ones that never change"
    )
    parser.addoption(
        "--as-drawn", action="store_true", help="property tests: don't shrink what fails, which takes minutes"
    )
    parser.addoption("--property-figures", metavar="FOLDER", help="property tests: write what was seen as JSON files")
    parser.addoption(
        "--problems", type=int, default=0, metavar="N", help="memory safety: this many problems of each kind"
    )
    parser.addoption("--figures", metavar="FILE", help="memory safety: what ran, added to this JSON file")
    parser.addoption(
        "--device",
        default="sm_90",
        metavar="ARCHITECTURE",
        help="what the emulator passes for where a test doesn't say it: sm_90 (default), sm_100 or sm_103",
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "witnesses: an upstream kernel whose compilation takes half a minute")
    config.addinivalue_line("markers", "faults: breaks a large program in every way, which takes minutes")
    config.addinivalue_line("markers", "gpu: needs a CUDA device; every test below tests/gpu/ is one")
    config.addinivalue_line("markers", "emulated: runs shipped programs in the PTX emulator")
    config.addinivalue_line("markers", "kernels_ci: quick test that the kernels community's CI may run")
    property_settings.configure(
        *map(config.getoption, ("--examples", "--property-seed", "--property-figures", "--as-drawn"))
    )
    folder = config.getoption("--variant")
    if folder and not (Path(folder) / "__init__.py").exists():
        raise pytest.UsageError(f"--variant expects a built variant, but {folder} holds no __init__.py")
    sys.meta_path.insert(0, VariantFinder(folder))


def pytest_collection_modifyitems(config, items):
    skip = pytest.mark.skip(reason="needs a CUDA device, torch.cuda.is_available() is False")
    emulating = config.getoption("--backend") == "emulated"
    available = not emulating and torch.cuda.is_available()
    for item in items:
        if item.path.name.startswith("test_emulated_"):
            item.add_marker(pytest.mark.emulated)
            if not emulating:
                item.add_marker(pytest.mark.skip(reason="runs in a session of its own, with --backend=emulated"))
        for name in ("faults", "witnesses"):
            if item.get_closest_marker(name) and not config.getoption(f"--{name}"):
                item.add_marker(pytest.mark.skip(reason=f"takes minutes: --{name}"))
        if (ROOT / "tests" / "gpu") in Path(item.path).parents:
            item.add_marker(pytest.mark.gpu)
        if not available and item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def variant_folder():
    """The folder of the variant that `import m3_sparse` loads."""
    import m3_sparse

    return Path(m3_sparse.__file__).parent


@pytest.fixture(scope="session")
def emulation(tmp_path_factory, variant_folder, pytestconfig):
    """The package's operators on the emulator; see ptx_emulator/session.py."""
    from ptx_emulator.session import Emulation

    import m3_sparse

    kernels = variant_folder.parent / "kernels"
    made = Emulation(tmp_path_factory.mktemp("driver"), kernels, pytestconfig.getoption("--device"))
    made.install(m3_sparse)
    return made


@pytest.fixture
def figures(pytestconfig):
    """`figures(name, facts)` keeps facts for the tables of docs/ where --figures asks for them."""

    def keep(name, **facts):
        path = pytestconfig.getoption("--figures")
        if path:
            file = Path(path)
            known = json.loads(file.read_text()) if file.exists() else {}
            file.write_text(json.dumps({**known, name: facts}, indent=1, sort_keys=True) + "\n")

    return keep


@pytest.fixture(scope="session")
def project():
    return load_project()


@pytest.fixture(scope="session")
def cpu_variant(project):
    return build.build_cpu(project, ROOT / "build")


@pytest.fixture(scope="session")
def cuda_variant(project):
    """The variant with the extension, built when it isn't current; tests of it are skipped where it can't be built."""
    if reason := cuda_extension.missing_tools():
        pytest.skip(f"the CUDA variant can't be built here: {reason}")
    return build.build_cuda(project, ROOT / "build")
