"""The built variants are what the `kernels` package and the Hub expect."""

import ast
import base64
import importlib.metadata
import json
import shutil
import subprocess
import sys
from pathlib import Path

import build
import cuda_extension
import project as project_module
import pytest
import source_tree
from kernels._rust import Backend, Build, DigestValidationError, Metadata
from kernels.archs import _supports_cuda_capability
from kernels.validate import default_metadata_validators
from kernels.variants import get_variants_local, resolve_variant

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(params=["cpu", "cuda"])
def variant(request):
    return request.getfixturevalue(f"{request.param}_variant")


@pytest.fixture
def small_project(tmp_path):
    """A project of one Python file, to build, change and damage."""
    root = tmp_path / "project"
    package = root / "torch-ext" / "m3_sparse"
    package.mkdir(parents=True)
    shutil.copy(ROOT / "build.toml", root)
    (package / "__init__.py").write_text("from ._ops import ops\n")
    return project_module.load_project(root)


def test_build_toml_is_accepted_by_the_kernels_parser(project):
    assert sorted(map(str, Build.open(ROOT).general.backends)) == ["cpu", "cuda"]
    assert project.branch == "v1"


def test_build_toml_names_every_source(project):
    """The builder copies only what is listed, headers included."""
    present = {p.relative_to(ROOT).as_posix() for p in (ROOT / "torch-ext").rglob("*") if p.suffix in (".cpp", ".h")}
    listed = {name for name in project.cuda_sources if not name.startswith(source_tree.GENERATED_FOLDER)}
    assert listed == present - {"torch-ext/registration.h"}


def test_metadata(variant, project):
    metadata = Metadata.read_from_file(variant / "metadata.json")
    backend = "cuda" if "cu130" in variant.name else "cpu"
    assert (str(metadata.name), metadata.version, metadata.license) == ("m3-sparse", 1, "Apache-2.0")
    assert metadata.id == project.operator_namespace(backend)
    assert metadata.backend.backend_type == Backend.from_str(backend)
    assert metadata.backend.archs == (["10.0f", "9.0a"] if backend == "cuda" else None)
    assert metadata.python_depends == [] and metadata.kernel_depends == []
    for validator in default_metadata_validators():
        validator.validate_metadata(metadata=metadata, variant=variant.name)


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((8, 0), False), ((9, 0), True), ((10, 0), True), ((10, 3), True), ((12, 0), False)],
)
def test_declared_architectures_are_those_of_the_cubins(project, capability, expected):
    assert _supports_cuda_capability(project.cuda_archs, capability) is expected


def test_variants_are_found_and_resolved_by_kernels(cpu_variant):
    found = get_variants_local(cpu_variant.parent)
    assert cpu_variant.name in {entry.variant_str for entry in found}
    chosen, _ = resolve_variant(found, "cpu")
    assert chosen.variant_str == "torch-cpu"


def test_variant_is_flat_and_holds_nothing_else(variant, project):
    names = {p.relative_to(variant).as_posix() for p in variant.rglob("*") if p.is_file() and p.suffix != ".pyc"}
    sources = {p.relative_to(project.python_folder).as_posix() for p in project.python_files()}
    extension = set()
    if "cu130" in variant.name:
        extension = {f"{project.operator_namespace('cuda')}.abi3.so", *project.kernel_sources()}
    assert names == sources | {"_ops.py", "metadata.json"} | extension


def test_no_file_of_the_kernel_compiler_is_in_a_variant(variant):
    files = build.digest_of(variant).files
    shipped = {base64.b64decode(value) for value in files.values()}
    compiler = {
        base64.urlsafe_b64decode(file.hash.value + "=")
        for distribution in importlib.metadata.distributions()
        if distribution.name.startswith("nvidia-cutlass-dsl")
        for file in distribution.files or []
        if file.hash is not None and file.size
    }
    if not compiler:
        pytest.skip("nvidia-cutlass-dsl isn't installed, there is nothing to compare with")
    assert not shipped & compiler


@pytest.mark.parametrize("damage", ["changed", "added", "removed"])
def test_digest_detects_tampering(variant, tmp_path, damage):
    copy = shutil.copytree(variant, tmp_path / variant.name, ignore=shutil.ignore_patterns("__pycache__"))
    expected = Metadata.read_from_file(copy / "metadata.json").digest
    expected.validate(build.digest_of(copy))
    assert build.intact(copy)
    if damage == "changed":
        with open(copy / "__init__.py", "a") as file:
            file.write("\n")
    elif damage == "added":
        (copy / "extra.py").write_text("")
    else:
        (copy / "_ops.py").unlink()
    with pytest.raises(DigestValidationError):
        expected.validate(build.digest_of(copy))
    assert not build.intact(copy)


def test_build_is_incremental_and_repairs_damage(small_project, tmp_path):
    out = tmp_path / "build"
    first = build.build_cpu(small_project, out)
    inode = first.stat().st_ino
    assert build.build_cpu(small_project, out).stat().st_ino == inode, "an unchanged variant was built again"
    (first / "_ops.py").write_text("damaged")
    build.build_cpu(small_project, out)
    assert build.intact(first) and first.stat().st_ino != inode
    (small_project.python_folder / "more.py").write_text("x = 1\n")
    build.build_cpu(small_project, out)
    assert (first / "more.py").exists() and build.intact(first)
    assert not [path for path in out.iterdir() if path.name.startswith(".torch-cpu")], "a staging folder was left"


def test_operator_namespace_follows_git(small_project):
    """Content decides before the first commit, the tree id after it, and a change to a tracked file is marked."""
    root = small_project.root

    def git(*arguments):
        identity = ["-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=false"]
        done = subprocess.run(["git", *identity, *arguments], cwd=root, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    plain = small_project.operator_namespace("cpu")
    assert plain == small_project.operator_namespace("cpu")
    (small_project.python_folder / "__init__.py").write_text("x = 1\n")
    assert small_project.operator_namespace("cpu") != plain

    git("init", "-q")
    git("add", "-A")
    git("commit", "-q", "-m", "first")
    tree = git("rev-parse", "HEAD^{tree}")
    assert small_project.operator_namespace("cuda") == f"_m3_sparse_cuda_{tree[:7]}"
    (root / "untracked").write_text("")
    assert not small_project.operator_namespace("cuda").endswith("_dirty")
    (small_project.python_folder / "__init__.py").write_text("x = 2\n")
    assert small_project.operator_namespace("cuda") == f"_m3_sparse_cuda_{tree[:7]}_dirty"


def test_package_imports_only_the_standard_library_and_torch(project):
    """At module level; anything else is optional and imported inside functions."""
    allowed = sys.stdlib_module_names | {"torch"}
    for path in project.python_files():
        tree = ast.parse(path.read_text(), feature_version=(3, 9))
        for node in top_level(tree):
            if isinstance(node, ast.Import):
                assert all(alias.name.split(".")[0] in allowed for alias in node.names), f"{path.name}:{node.lineno}"
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                assert node.module.split(".")[0] in allowed, f"{path.name}:{node.lineno}"


def top_level(node):
    """The nodes that run on import: everything outside function bodies."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield child
            yield from top_level(child)


def test_operator_registrations_use_the_namespace(project):
    """kernel-builder refuses a torch.library decorator whose first argument isn't this very call. A plain call may name a
    variable that holds its result."""
    registrations = {"custom_op", "triton_op", "register_kernel", "register_fake"}

    def prefixed(node):
        return isinstance(node, ast.Call) and called(node) == "add_op_namespace_prefix"

    found = 0
    for path in project.python_files():
        nodes = list(ast.walk(ast.parse(path.read_text())))
        decorators = [each for node in nodes for each in getattr(node, "decorator_list", [])]
        held = {node.targets[0].id for node in nodes if isinstance(node, ast.Assign) and prefixed(node.value)}
        for node in nodes:
            if isinstance(node, ast.Call) and node.args and called(node) in registrations:
                found += 1
                name = node.args[0]
                variable = node not in decorators and isinstance(name, ast.Name) and name.id in held
                assert prefixed(name) or variable, f"{path.name}:{node.lineno}"
    assert found > 0


def called(node):
    return getattr(node.func, "id", getattr(node.func, "attr", None))


def test_import_has_no_side_effects(variant):
    """It prints nothing, starts no CUDA context and pulls in no optional package."""
    code = f"""
import importlib.util, json, sys
import torch
spec = importlib.util.spec_from_file_location("m3_sparse", {str(variant / "__init__.py")!r},
                                              submodule_search_locations=[{str(variant)!r}])
module = sys.modules["m3_sparse"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
optional = ["transformers", "triton", "cutlass", "kernels", "flash_attn"]
print(json.dumps([torch.cuda.is_initialized(), [name for name in optional if name in sys.modules],
                  sorted(set(module.__all__) - set(dir(module)))]))
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [False, [], []]
    assert done.stderr == ""


def test_missing_compiler_is_said(monkeypatch, tmp_path, project):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert "no C++ compiler" in cuda_extension.missing_tools()
    with pytest.raises(RuntimeError, match="no C\\+\\+ compiler"):
        cuda_extension.compile_tree(project, tmp_path, "_m3_sparse_cuda_0000000", tmp_path / "work")


def test_the_cuda_variant_gets_sessions_of_its_own(tmp_path):
    import run_tests

    [plain] = run_tests.sessions([], None, True)
    assert plain[-1].endswith("tests")
    assert run_tests.sessions(["tests/test_ops.py"], tmp_path, True) == [[*plain[:-1], "tests/test_ops.py"]]
    cpu, emulated, gpu = run_tests.sessions([], tmp_path, True)
    assert f"--ignore={run_tests.ROOT / 'tests' / 'gpu'}" in cpu and gpu[3] == str(run_tests.ROOT / "tests" / "gpu")
    assert gpu[-2:] == ["--variant", str(tmp_path)] and "-n" not in gpu
    files = emulated[emulated.index(str(tmp_path)) + 1 :]
    assert files and all(f"--ignore={file}" in cpu for file in files)
    assert run_tests.sessions([], tmp_path, False) == [[x for x in cpu if not x.endswith("gpu")], emulated]
