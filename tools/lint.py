"""What reads the sources without running them: all of it, or the checks named.

    python tools/lint.py [ruff] [format] [mypy] [clang-format] [warnings] [clang-tidy]

`warnings` compiles every C++ file of the launcher with g++, and with clang++ where there is one, as C++17 and C++20, with
all warnings as errors; it and clang-tidy need the generated headers, which the first build of the CUDA variant writes.
"""

import argparse
import itertools
import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import cuda_extension
import source_tree
from project import ROOT, load_project

WARNINGS = (
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wcast-qual",
    "-Wnon-virtual-dtor",
    "-Woverloaded-virtual",
    "-fvisibility=hidden",
)
# Generated, or laid out by hand: tables of numbers, the tensor map's bits, an interface that is not ours.
OWN_LAYOUT = ("tests/ptx_emulator/core/tensor_map.h", "tests/ptx_emulator/upstream_host.c")


def tool(name: str) -> str:
    """As pip installed it beside this Python, else from the PATH."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else name


def run(*command, folder: Path = ROOT) -> str:
    """The output of a command that failed; nothing if it passed."""
    done = subprocess.run([str(word) for word in command], cwd=folder, capture_output=True, text=True)
    return (
        "" if done.returncode == 0 else (done.stdout + done.stderr).strip() or f"{command[0]}: status {done.returncode}"
    )


def cpp_sources() -> list[Path]:
    return [*sorted((ROOT / "torch-ext" / "launch").glob("*.cpp")), ROOT / "torch-ext" / "torch_binding.cpp"]


def cpp_flags(standard: str = "c++17") -> list[str]:
    """Those that matter to what a file says; tools/CMakeLists.txt has all."""
    project = load_project()
    tree = ROOT / "build" / "source"
    if not (tree / "generated" / "cubins.h").exists():
        source_tree.write_source_tree(project, source_tree.export_kernels(project, ROOT / "build"), tree)
    cuda_extension.write_registration(tree)
    target = cuda_extension.torch_target(project.stable_abi)
    defined = ["CUDA_KERNEL", "USE_CUDA=1", "Py_LIMITED_API=0x03090000", f"TORCH_TARGET_VERSION={target}"]
    flags = [f"-std={standard}", *(f"-D{name}" for name in (*defined, "TORCH_EXTENSION_NAME=m3_sparse_lint"))]
    # The repository's own headers are found beside the sources; the tree adds registration.h and cubins.h.
    for folder in (ROOT / "torch-ext" / "launch", tree / "generated", tree / "torch-ext"):
        flags += ["-I", str(folder)]
    folders = (cuda_extension.torch_folder() / "include", cuda_extension.cuda_headers(), sysconfig.get_path("include"))
    for folder in folders:
        flags += ["-isystem", str(folder)]
    return flags


def each(command) -> str:
    """`command(file)` for every C++ source, on all cores."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return "\n".join(filter(None, pool.map(command, cpp_sources())))


def ruff() -> str:
    return run(tool("ruff"), "check", "--output-format=concise", ".")


def ruff_format() -> str:
    return run(tool("ruff"), "format", "--check", ".")


def mypy() -> str:
    settings = ROOT / "pyproject.toml"
    return run(sys.executable, "-m", "mypy", "--config-file", settings, "-p", "m3_sparse", folder=ROOT / "torch-ext")


def clang_format() -> str:
    folders = ("torch-ext", "tests")
    files = [
        path for folder in folders for kind in ("c", "cpp", "h", "cu") for path in (ROOT / folder).rglob(f"*.{kind}")
    ]
    names = sorted(str(path.relative_to(ROOT)) for path in files)
    return run(tool("clang-format"), "--dry-run", "-Werror", *(name for name in names if name not in OWN_LAYOUT))


def warnings() -> str:
    compilers = [name for name in (cuda_extension.find_compiler(), shutil.which("clang++")) if name]
    if not compilers:
        return "no C++ compiler"
    if not shutil.which("clang++"):
        print("warnings: no clang++ here, so of one compiler alone", flush=True)
    return "\n".join(filter(None, (compiled(*pair) for pair in itertools.product(compilers, ("c++17", "c++20")))))


def compiled(compiler: str, standard: str) -> str:
    flags = [*WARNINGS, *cpp_flags(standard)]
    return each(lambda file: run(compiler, "-fsyntax-only", *flags, file))


def clang_tidy() -> str:
    flags = cpp_flags()
    return each(lambda file: run(tool("clang-tidy"), "--quiet", file, "--", *flags))


CHECKS = {
    "ruff": ruff,
    "format": ruff_format,
    "mypy": mypy,
    "clang-format": clang_format,
    "warnings": warnings,
    "clang-tidy": clang_tidy,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checks", nargs="*", choices=[*CHECKS, []], help="default: all")
    failed = False
    for name in parser.parse_args().checks or CHECKS:
        problems = CHECKS[name]()
        print(f"{name}: {'clean' if not problems else problems}", flush=True)
        failed = failed or bool(problems)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
