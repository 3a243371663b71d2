"""The extension is portable, the checker that says so catches what isn't, and the builder's tree compiles."""

import subprocess
import sys
from pathlib import Path

import abi_check
import cuda_extension
import pytest
import source_tree
from kernels._rust import Build

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def library(cuda_variant):
    (path,) = cuda_variant.glob("*.so")
    return path


@pytest.fixture
def compiled(tmp_path):
    """Compiles a few lines to a shared library."""
    if reason := cuda_extension.missing_tools():
        pytest.skip(reason)

    def compile_library(source, *options):
        path = tmp_path / "bad.so"
        (tmp_path / "bad.cpp").write_text(source)
        command = [cuda_extension.find_compiler(), "-shared", "-fPIC", "-O1", "-fvisibility=hidden", "-o", str(path)]
        subprocess.run([*command, str(tmp_path / "bad.cpp"), *options], check=True)
        return path

    return compile_library


def test_library_is_portable(library):
    assert abi_check.violations(library) == []


def test_library_holds_no_path_of_the_build_machine(library):
    data = library.read_bytes()
    for folder in (ROOT, sys.prefix, cuda_extension.torch_folder()):
        assert str(folder).encode() not in data, folder


def test_a_portable_library_passes(compiled):
    assert abi_check.violations(compiled('extern "C" int helper() { return 1; }')) == []


@pytest.mark.parametrize(
    ("source", "options", "expected"),
    [
        (
            "namespace c10 { void hidden_detail(); } namespace { struct A { A() { c10::hidden_detail(); } } a; }",
            [],
            "outside torch's stable ABI: c10::hidden_detail()",
        ),
        (
            (
                'extern "C" const char* PyUnicode_AsUTF8AndSize(void*, long*); const char* f(void* o);'
                "namespace { struct A { A() { PyUnicode_AsUTF8AndSize(nullptr, nullptr); } } a; }"
            ),
            [],
            "outside CPython's stable ABI",
        ),
        (
            "namespace std { void nobody_has_this(); } namespace { struct A { A() { std::nobody_has_this(); } } a; }",
            [],
            "C++ runtime symbol without a version: std::nobody_has_this()",
        ),
        (
            "#include <sstream>\nnamespace { struct A { A() { std::stringstream s; s << 1; } } a; }",
            [],
            "newer than manylinux_2_28",
        ),
        ("int x;", ["-Wl,-rpath,/opt/somewhere"], "has a run path: /opt/somewhere"),
        ('extern "C" __attribute__((visibility("default"))) int leaked() { return 1; }', [], "exports leaked"),
    ],
    ids=["torch", "python", "unversioned", "new-libstdcxx", "run-path", "export"],
)
@pytest.mark.parametrize("stripped", [False, True])
def test_checker_catches(compiled, source, options, expected, stripped):
    found = abi_check.violations(compiled(source, *options, *(["-s"] if stripped else [])))
    assert any(expected in line for line in found), found


def test_checker_catches_a_foreign_library(compiled, tmp_path):
    other = tmp_path / "libcudart.so.13"
    empty = ["-Wl,-soname,libcudart.so.13", "-xc++", "/dev/null"]
    subprocess.run([cuda_extension.find_compiler(), "-shared", "-o", str(other), *empty], check=True)
    found = abi_check.violations(compiled("int x;", "-Wl,--no-as-needed", str(other)))
    assert found == ["needs a library other than torch's and the system's: libcudart.so.13"]


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("GLIBC_2.28", False),
        ("GLIBC_2.29", True),
        ("GLIBC_PRIVATE", True),
        ("GLIBCXX_3.4.24", False),
        ("GLIBCXX_3.4.25", True),
        ("CXXABI_1.3.11", False),
        ("CXXABI_1.3.12", True),
        ("CXXABI_FLOAT128", False),
        ("GCC_3.0", False),
        ("OPENSSL_9.9", False),
    ],
)
def test_symbol_versions(version, expected):
    assert abi_check.too_new(version) is expected


def test_builder_tree_compiles_from_its_own_source_list(project, cuda_variant, tmp_path):
    """As kernel-builder would see it: nothing but the tree, the source list of its build.toml, and the older C++17."""
    tree = source_tree.write_source_tree(project, ROOT / "build" / source_tree.GENERATED_FOLDER, tmp_path / "tree")
    assert Build.open(tree)
    for name in project.cuda_sources:
        assert (tree / name).is_file(), name
    assert not [path for path in tree.rglob("*") if path.suffix in (".cubin", ".so", ".ptx")], "sources only"

    namespace = "_m3_sparse_cuda_treetest"
    built = cuda_extension.compile_tree(project, tree, namespace, tmp_path / "work", "-DCMAKE_CXX_STANDARD=17")
    assert abi_check.violations(built) == []
    code = f"""
import importlib.machinery, importlib.util
import torch
loader = importlib.machinery.ExtensionFileLoader({namespace!r}, {str(built)!r})
spec = importlib.util.spec_from_file_location({namespace!r}, {str(built)!r}, loader=loader)
loader.exec_module(importlib.util.module_from_spec(spec))
print(torch.ops.{namespace}.aot_merge_states.default._schema)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"{namespace}::aot_merge_states(Tensor(a!) out, Tensor(b!) lse, Tensor outs, Tensor lses)" in done.stdout


def test_tree_follows_its_sources(project, cuda_variant, tmp_path):
    """Written twice, unchanged files keep their time, and what is no source any more goes."""
    generated, tree = ROOT / "build" / source_tree.GENERATED_FOLDER, tmp_path / "tree"
    source_tree.write_source_tree(project, generated, tree)
    before = {path: path.stat().st_mtime_ns for path in tree.rglob("*.cpp")}
    (tree / "generated" / "old.cpp").write_text("")
    source_tree.write_source_tree(project, generated, tree)
    assert {path: path.stat().st_mtime_ns for path in tree.rglob("*.cpp")} == before


def test_missing_source_is_named(project, tmp_path):
    empty = tmp_path / "generated"
    empty.mkdir()
    with pytest.raises(FileNotFoundError, match="generated/cubins.cpp"):
        source_tree.write_source_tree(project, empty, tmp_path / "tree")
