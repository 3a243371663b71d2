"""Compile every kernel for every architecture, with no GPU: kernel x variant x arch -> cubin, PTX and manifest.

    python kernel-src/export.py --out build/kernels [--arch sm_90a ...] [--only combine] [--jobs 2]

For each program: `<name>_<arch>.cubin`, `.ptx` (the record of what was compiled) and `.json` (manifest.py), and one
`index.json` with them all. A program is compiled again only if its kernel file, the shared sources, this exporter or the
compiler's version changed. One worker process per kernel file and architecture: the DSL fixes its target when it is
imported.
"""

import argparse
import hashlib
import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import manifest

SOURCE = Path(__file__).resolve().parent
ARCHS = {"neutral": ("sm_90a", "sm_100a", "sm_103a"), "sm90": ("sm_90a",), "sm100": ("sm_100a", "sm_103a")}
COMPILER_PACKAGES = ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-cu13", "flash-attn-4", "quack-kernels")


def kernel_files():
    return sorted(path for folder in ARCHS for path in (SOURCE / folder).glob("*.py") if path.name != "__init__.py")


def source_digest(kernel_file):
    """Digest of all that decides what a kernel file compiles to, apart from the architecture."""
    digest = hashlib.sha256()
    for path in [kernel_file, *sorted((SOURCE / "shared").glob("*.py")), SOURCE / "manifest.py", Path(__file__)]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    for package in COMPILER_PACKAGES:
        try:
            digest.update(f"{package} {importlib.metadata.version(package)}\0".encode())
        except importlib.metadata.PackageNotFoundError:
            digest.update(f"{package} absent\0".encode())
    return digest.hexdigest()


def is_current(out, kernel_file, arch, digest):
    """Whether all programs of a kernel file are in `out` for this architecture, made from these sources."""
    stamp = out / "stamps" / f"{kernel_file.stem}_{arch}.json"
    if not stamp.exists():
        return False
    record = json.loads(stamp.read_text())
    if record["digest"] != digest:
        return False
    return all((out / f"{name}.{kind}").exists() for name in record["programs"] for kind in ("cubin", "ptx", "json"))


def compile_file(out, kernel_file, arch, digest, only=None):
    """Compile the programs of one kernel file for one architecture, or one of them; runs in a process of its own."""
    with tempfile.TemporaryDirectory() as dump:
        # The artifacts are kept only if the dump folder exists; without it the DSL hands out path strings instead.
        os.environ.update(CUTE_DSL_ARCH=arch, CUTE_DSL_KEEP="ir,ptx,cubin", CUTE_DSL_DUMP_DIR=dump)
        import cutlass.cute as cute
        from cutlass.cute.runtime import make_fake_stream

        module = importlib.import_module(f"{kernel_file.parent.name}.{kernel_file.stem}")
        names = []
        for program in module.programs():
            name = f"{program.name}_{arch.replace('_', '')}"
            if only not in (None, name):
                continue
            # The default entry name mangles all argument types and is cut at 180 characters.
            program.kernel.kernel.set_name_prefix(f"m3s_{name}", remove_cutlass_symbol=True, keep_mangled_name=False)
            compiled = cute.compile(program.kernel.entry, make_fake_stream(), *program.kernel.examples())
            artifacts = compiled.artifacts
            if not isinstance(artifacts.CUBIN, bytes):
                raise RuntimeError(f"{name}: the DSL kept no cubin")
            facts = manifest.describe(artifacts.PTX, artifacts.CUBIN, artifacts.MLIR, program.kernel.dynamic_smem)
            facts = {"name": name, "program": program.name, "kernel": kernel_file.stem, **facts}
            (out / f"{name}.cubin").write_bytes(artifacts.CUBIN)
            (out / f"{name}.ptx").write_text(artifacts.PTX)
            (out / f"{name}.json").write_text(json.dumps(facts, indent=1) + "\n")
            names.append(name)
    if only is not None:
        return
    stamp = out / "stamps" / f"{kernel_file.stem}_{arch}.json"
    stamp.write_text(json.dumps({"digest": digest, "programs": names}))


def write_index(out, work):
    """index.json over all programs in order; files of programs that are no more are removed."""
    names = []
    for kernel_file, arch, _ in work:
        stamp = out / "stamps" / f"{kernel_file.stem}_{arch}.json"
        names += json.loads(stamp.read_text())["programs"]
    keep = {f"{name}.{kind}" for name in names for kind in ("cubin", "ptx", "json")} | {"index.json"}
    for path in out.iterdir():
        if path.is_file() and path.name not in keep:
            path.unlink()
    index = [json.loads((out / f"{name}.json").read_text()) for name in names]
    text = json.dumps(index, indent=1) + "\n"
    target = out / "index.json"
    if not target.exists() or target.read_text() != text:
        target.write_text(text)
    return index


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/kernels"))
    parser.add_argument("--arch", action="append", choices=sorted({a for archs in ARCHS.values() for a in archs}))
    parser.add_argument("--only", action="append", help="stem of a kernel file")
    parser.add_argument("--program", help="compile this one alone, into --out; takes one --only and one --arch")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--worker", nargs=3, metavar=("FILE", "ARCH", "DIGEST"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    (options.out / "stamps").mkdir(parents=True, exist_ok=True)
    if options.worker:
        kernel_file, arch, digest = options.worker
        return compile_file(options.out, Path(kernel_file), arch, digest)

    if options.program:
        (arch,), (stem,) = options.arch, options.only
        (kernel_file,) = [p for p in kernel_files() if p.stem == stem and arch in ARCHS[p.parent.name]]
        return compile_file(options.out, kernel_file, arch, None, only=options.program)

    work = []
    for kernel_file in kernel_files():
        if options.only and kernel_file.stem not in options.only:
            continue
        digest = source_digest(kernel_file)
        for arch in ARCHS[kernel_file.parent.name]:
            if not options.arch or arch in options.arch:
                work.append((kernel_file, arch, digest))
    stale = [job for job in work if not is_current(options.out, *job)]

    def run(job):
        command = [sys.executable, __file__, "--out", str(options.out), "--worker", *map(str, job)]
        done = subprocess.run(command, capture_output=True, text=True)
        print(f"{job[0].parent.name}/{job[0].stem} {job[1]}: {'failed' if done.returncode else 'compiled'}", flush=True)
        return done.stderr if done.returncode else None

    with ThreadPoolExecutor(max(1, options.jobs)) as pool:
        errors = [error for error in pool.map(run, stale) if error]
    if errors:
        sys.exit("\n".join(errors))
    complete = not options.arch and not options.only
    if complete:
        index = write_index(options.out, work)
        print(
            f"{len(index)} programs in {options.out}, {len(stale)} of {len(work)} kernel-file/arch pairs compiled now"
        )


if __name__ == "__main__":
    main()
