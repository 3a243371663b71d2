"""Check every shared library below a folder for portability, without a GPU and without network access.

    python tools/abi_check.py build/

1. manylinux_2_28: the glibc, libstdc++ and libgcc symbol versions that it needs are old enough, and no symbol of the
   C++ runtime is needed *without* a version (the linker then took it from another library on the link line, for
   example from libc10, which need not export it in every torch release).
2. CPython's stable ABI 3.9 (abi3): no CPython symbol outside the limited API.
3. torch's stable ABI: no C++ symbol of c10::, at:: or torch:: other than torch::stable::.
4. It needs torch's libraries and the C and C++ runtimes, nothing else; in particular neither CUDA's runtime nor its
   driver, so that it can be loaded where there is none.
5. It has no run path, and it exports its Python module's entry alone, so that two versions can be loaded at once.

The symbol rules read the *dynamic* symbol table. That matters: `kernel-abi-check` (PyPI) reads the ordinary symbol
table, which `strip` removes, so it passes any stripped library. Here it only supplies the list of CPython symbols, and
it is handed a small object file that repeats the names that the library needs.

Not covered: whether each torch *shim* function exists in the oldest torch that is promised (load it there to find out).

Needs nm, readelf and as (binutils 2.35 or newer) and kernel-abi-check. The exit status is 0 when every library passes,
1 when one fails, 2 when there is none.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

PYTHON_ABI = "3.9"
# Newest symbol version that manylinux_2_28 allows, per version family.
NEWEST_ALLOWED = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
CXX_RUNTIME = re.compile(r"((vtable|VTT|typeinfo|typeinfo name|guard variable) for )?(std|__gnu_cxx|__cxxabiv1)::")
TORCH_NAMESPACES = ("c10::", "at::", "torch::")
TORCH_STABLE = "torch::stable::"
TORCH_LIBRARIES = re.compile(r"lib(torch|torch_cpu|torch_cuda|c10|c10_cuda)\.so")
SYSTEM_LIBRARIES = re.compile(r"(lib(c|m|dl|pthread|rt|stdc\+\+|gcc_s)\.so\.\d+|ld-linux-[\w-]+\.so\.\d+)")
EXPORTED = re.compile(r"PyInit_\w+")


def output_of(*command: str) -> list[str]:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def needed_symbols(library: Path) -> list[tuple[str, str]]:
    """(demangled name, symbol version or "") of everything that the library expects others to provide."""
    symbols = []
    for line in output_of("nm", "-D", "--undefined-only", "-C", str(library)):
        fields = line.split(maxsplit=1)
        if len(fields) == 2:
            name, _, version = fields[1].partition("@")
            symbols.append((name, version.lstrip("@")))
    return symbols


def exported_symbols(library: Path) -> list[str]:
    """Global symbols alone: nm shows local ones in lower case, and unique ones ("u") count as global."""
    found = []
    for line in output_of("nm", "-D", "--defined-only", str(library)):
        *_, kind, name = line.split()
        if kind.isupper() or kind == "u":
            found.append(name.partition("@")[0])
    return found


def too_new(version: str) -> bool:
    """Whether a symbol version such as GLIBC_2.34 is newer than manylinux_2_28 allows."""
    family, _, number = version.partition("_")
    if family not in NEWEST_ALLOWED:
        return False
    if number == "PRIVATE":
        return True
    if not re.fullmatch(r"\d+(\.\d+)*", number):
        return False  # for example CXXABI_FLOAT128
    return tuple(int(part) for part in number.split(".")) > NEWEST_ALLOWED[family]


def python_violations(names: list[str]) -> list[str]:
    """CPython symbols among `names` that are outside the limited API."""
    from kernel_abi_check import ObjectFile

    names = [name for name in names if re.match(r"_?Py\w*$", name)]
    if not names:
        return []
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "names.s"), Path(folder, "names.o")
        source.write_text(".data\n" + "".join(f".quad {name}\n" for name in names))
        subprocess.run(["as", "-o", str(target), str(source)], check=True)
        return [str(violation) for violation in ObjectFile(target).check_python_abi(PYTHON_ABI)]


def loading_violations(library: Path) -> list[str]:
    """What the dynamic section says about how the library is found and what it pulls in."""
    found = []
    for line in output_of("readelf", "-dW", str(library)):
        if match := re.search(r"\((NEEDED|RPATH|RUNPATH)\).*\[(.*)\]", line):
            kind, value = match.groups()
            if kind != "NEEDED":
                found.append(f"has a run path: {value}")
            elif not (TORCH_LIBRARIES.fullmatch(value) or SYSTEM_LIBRARIES.fullmatch(value)):
                found.append(f"needs a library other than torch's and the system's: {value}")
    return found


def violations(library: Path) -> list[str]:
    """All rule violations of one library, as printable lines."""
    symbols = needed_symbols(library)
    found = [f"newer than manylinux_2_28: {name} ({version})" for name, version in symbols if too_new(version)]
    unversioned = [name for name, version in symbols if not version and CXX_RUNTIME.match(name)]
    found += [f"C++ runtime symbol without a version: {name}" for name in unversioned]
    found += [f"outside CPython's stable ABI: {violation}" for violation in python_violations([s for s, _ in symbols])]
    for name, _ in symbols:
        if name.startswith(TORCH_NAMESPACES) and not name.startswith(TORCH_STABLE):
            found.append(f"outside torch's stable ABI: {name}")
    found += loading_violations(library)
    found += [f"exports {name}" for name in exported_symbols(library) if not EXPORTED.fullmatch(name)]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Portability check of shared libraries.")
    parser.add_argument("root", type=Path, help="a folder that is searched recursively, or one library")
    root = parser.parse_args().root
    libraries = [root] if root.is_file() else sorted(root.rglob("*.so"))
    if not libraries:
        print(f"no shared library below {root}", file=sys.stderr)
        return 2
    failed = False
    for library in libraries:
        found = violations(library)
        print(library, "FAIL" if found else "OK")
        for line in found:
            print("    ", line)
        failed = failed or bool(found)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
