"""kernel-src/export.py, manifest.py and embed.py: from CuTe-DSL to cubins, manifests and C++ tables."""

import ast
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason="needs nvidia-cutlass-dsl (a build-time dependency)"
)


def export(source, out, *options):
    command = [sys.executable, str(source / "export.py"), "--out", str(out), *options]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of kernel-src that a test may change."""
    folder = tmp_path_factory.mktemp("copy") / "kernel-src"
    shutil.copytree(ROOT / "kernel-src", folder, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(scope="module")
def exported(source, tmp_path_factory):
    """The combine kernel's programs for sm_90a."""
    out = tmp_path_factory.mktemp("kernels")
    done = export(source, out, "--only", "combine", "--arch", "sm_90a")
    assert done.returncode == 0, done.stderr
    return out


def manifests(folder):
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("combine*.json"))}


def load_manifest_module():
    spec = importlib.util.spec_from_file_location("manifest", ROOT / "kernel-src" / "manifest.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_manifest_says_what_a_launch_needs(exported):
    facts = manifests(exported)["combine_f32_bf16_sm90a"]
    assert facts["entry"] == "m3s_combine_f32_bf16_sm90a_0"
    assert facts["arch"] == "sm_90a"
    assert facts["block"] == [128, 1, 1]
    assert facts["dynamic_smem"] == 0
    assert 0 < facts["registers"] <= 64
    assert facts["stack_bytes"] == 0  # no spills
    assert [p["kind"] for p in facts["params"]] == ["i64"] * 14 + ["i32"] * 3
    assert [p["offset"] for p in facts["params"]] == [8 * i for i in range(14)] + [112, 116, 120]


def test_every_architecture_has_the_same_parameters():
    """The C++ side packs one parameter list for all of them."""
    index = json.loads((ROOT / "build" / "kernels" / "index.json").read_text())
    of_folder = {"neutral": {"sm_90a", "sm_100a", "sm_103a"}, "sm90": {"sm_90a"}, "sm100": {"sm_100a", "sm_103a"}}
    by_program, expected = {}, {}
    for folder, archs in of_folder.items():
        for path in (ROOT / "kernel-src" / folder).glob("*.py"):
            # A program may have its name from one folder or from kernel files of the same name in two.
            known = expected.setdefault(path.stem, [])
            known += [archs, *(archs | other for other in known)]
    for facts in index:
        sizes = [(p["size"], p["align"], p["kind"]) for p in facts["params"]]
        by_program.setdefault((facts["program"], facts["kernel"]), {})[facts["arch"]] = sizes
    assert ("combine_f32_f32", "combine") in by_program
    for (program, kernel), archs in by_program.items():
        assert set(archs) in expected[kernel], program
        assert len({tuple(sizes) for sizes in archs.values()}) == 1, program


def test_sm90_and_sm100_name_the_same_parameters():
    """Two strides that changed places have the same types."""

    def parameters(path):
        functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
        (kernel,) = [node for node in functions if node.name == "kernel"]
        return [(x.arg, ast.unparse(x.annotation)) for x in kernel.args.args[1:]]

    paths = {path.name: path for path in (ROOT / "kernel-src" / "sm90").glob("*.py")}
    pairs = [(paths[path.name], path) for path in (ROOT / "kernel-src" / "sm100").glob("*.py") if path.name in paths]
    assert len(pairs) == 4
    for sm90, sm100 in pairs:
        assert parameters(sm90) == parameters(sm100), sm100.name


def test_an_unchanged_kernel_is_not_compiled_again(source, exported):
    before = {path.name: path.stat().st_mtime_ns for path in exported.glob("combine*")}
    assert export(source, exported, "--only", "combine", "--arch", "sm_90a").stdout == ""
    assert before == {path.name: path.stat().st_mtime_ns for path in exported.glob("combine*")}
    kernel = source / "neutral" / "combine.py"
    kernel.write_text(kernel.read_text() + "\n# changed\n")
    done = export(source, exported, "--only", "combine", "--arch", "sm_90a")
    assert "combine sm_90a: compiled" in done.stdout


def test_compilation_is_reproducible(source, exported, tmp_path):
    done = export(source, tmp_path, "--only", "combine", "--arch", "sm_90a")
    assert done.returncode == 0, done.stderr
    images = sorted(exported.glob("*.cubin"))
    assert len(images) == 5
    for image in images:
        assert image.read_bytes() == (tmp_path / image.name).read_bytes(), image.name


def test_a_failing_kernel_fails_the_export(source, tmp_path):
    broken = source / "neutral" / "broken.py"
    broken.write_text("def programs():\n    raise RuntimeError('no such kernel')\n")
    try:
        done = export(source, tmp_path, "--only", "broken", "--arch", "sm_90a")
    finally:
        broken.unlink()
    assert done.returncode != 0
    assert "no such kernel" in done.stderr


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda ptx, mlir: (ptx.replace(".param .u32", ".param .u64", 1), mlir), "sizes differ"),
        (lambda ptx, mlir: (ptx, mlir.replace("%arg16: i32", "%arg16: i32, %arg17: i32")), "18 parameters in MLIR, 17"),
        (lambda ptx, mlir: (ptx, mlir.replace("%arg16: i32", "%arg16: !cute.fast_divmod")), "fast_divmod"),
        (lambda ptx, mlir: (ptx.replace(".reqntid 128, 1, 1", ""), mlir), "no .reqntid"),
    ],
)
def test_a_contract_that_differs_between_sources_is_refused(exported, change, message):
    module = load_manifest_module()
    name = "combine_f32_f32_sm90a"
    ptx = (exported / f"{name}.ptx").read_text()
    cubin = (exported / f"{name}.cubin").read_bytes()
    arguments = ", ".join(f"%arg{i}: {'i64' if i < 14 else 'i32'}" for i in range(17))
    mlir = f"cuda.kernel @m3s_{name}_0({arguments}) attributes {{}}"
    assert module.describe(ptx, cubin, mlir, 0)["entry"] == f"m3s_{name}_0"
    ptx, mlir = change(ptx, mlir)
    with pytest.raises(module.ContractError, match=message):
        module.describe(ptx, cubin, mlir, 0)


def test_the_compiler_refuses_cpp_that_packs_other_parameters(tmp_path):
    """static_assert in torch-ext/launch compares the C++ parameter types with the manifests."""
    sys.path.insert(0, str(ROOT / "tools"))
    import cuda_extension

    if reason := cuda_extension.missing_tools():
        pytest.skip(reason)
    index = json.loads((ROOT / "build" / "kernels" / "index.json").read_text())

    def compiles(index):
        kernels, out = tmp_path / "kernels", tmp_path / "generated"
        kernels.mkdir(exist_ok=True)
        (kernels / "index.json").write_text(json.dumps(index))
        for facts in index:
            shutil.copy(ROOT / "build" / "kernels" / f"{facts['name']}.cubin", kernels)
        embed = [sys.executable, str(ROOT / "kernel-src" / "embed.py"), "--kernels", str(kernels), "--out", str(out)]
        subprocess.run(embed, check=True)
        includes = [cuda_extension.torch_folder() / "include", ROOT / "torch-ext" / "launch", out]
        command = [cuda_extension.find_compiler(), "-std=c++17", "-fsyntax-only", *(f"-I{path}" for path in includes)]
        command += [f"-DTORCH_TARGET_VERSION={cuda_extension.torch_target('2.11')}"]
        done = subprocess.run(
            [*command, str(ROOT / "torch-ext" / "launch" / "combine.cpp")], capture_output=True, text=True
        )
        return done.returncode == 0, done.stderr

    good, errors = compiles(index)
    assert good, errors
    for change in ({"size": 8, "align": 8}, {"align": 16}):
        changed = json.loads(json.dumps(index))
        [facts for facts in changed if facts["kernel"] == "combine"][-1]["params"][-1].update(change)
        good, errors = compiles(changed)
        assert not good
        assert "static assertion failed" in errors
    changed = json.loads(json.dumps(index))
    next(facts for facts in changed if facts["kernel"] == "combine")["params"].pop()
    assert not compiles(changed)[0]
