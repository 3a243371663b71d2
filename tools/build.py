"""Build the package's hub variants without Nix.

    python tools/build.py cpu|cuda|all [--out build]

writes <out>/torch-cpu (Python only) and <out>/torch-stable-abi<torch>-cu<cuda>-<platform> (the same plus the extension
that holds the cubins), each with the metadata.json and the digests that the `kernels` package checks. A variant whose
sources didn't change is left alone, and one that did is replaced as a whole.
"""

import argparse
import fcntl
import json
import os
import shutil
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from project import Project, git_state, hash_files, load_project

# The oldest `kernels` release that knows every metadata key written here.
KERNELS_MINVER = "0.17.0"
CPU_VARIANT = "torch-cpu"

OPS_HEAD = '''"""Generated: the namespace of this build's operators."""

import torch
'''
OPS_BODY = """
ops = torch.ops.{namespace}


def add_op_namespace_prefix(op_name: str) -> str:
    return f"{namespace}::{{op_name}}"
"""


def cuda_variant_name(project: Project) -> str:
    torch_version = project.stable_abi.replace(".", "")
    cuda_version = project.cuda_version.replace(".", "")
    return f"torch-stable-abi{torch_version}-cu{cuda_version}-{os.uname().machine}-linux"


def build_cpu(project: Project, out: Path) -> Path:
    namespace = project.operator_namespace("cpu")
    with locked(out):
        files = [*project.python_files(), *tool_files(project)]
        inputs = hash_files(project.root, files, extra=identity(project, "cpu"))
        return write_variant(project, out, CPU_VARIANT, namespace, inputs, extension=None)


def build_cuda(project: Project, out: Path) -> Path:
    """Export the kernels, compile the extension and assemble the CUDA variant."""
    import cuda_extension

    namespace = project.operator_namespace("cuda")
    with locked(out):
        extension = cuda_extension.build(project, namespace, out)
        files = [*project.python_files(), *project.kernel_sources().values(), *tool_files(project)]
        inputs = hash_files(project.root, files, extra=identity(project, "cuda") + hash_files(out, [extension]))
        return write_variant(project, out, cuda_variant_name(project), namespace, inputs, extension)


def tool_files(project: Project) -> list[Path]:
    names = ("tools/build.py", "tools/project.py", "build.toml")
    return [project.root / name for name in names if (project.root / name).exists()]


def identity(project: Project, backend: str) -> str:
    return f"{project.operator_namespace(backend)} {git_state(project.root)}"


def write_variant(project: Project, out: Path, name: str, namespace: str, inputs: str, extension: Path | None) -> Path:
    """Put <out>/<name> in place, unless it already is what `inputs` (a hash) leads to and nobody touched it."""
    target, stamp = out / name, out / ".stamps" / name
    if stamp.exists() and stamp.read_text() == inputs and intact(target):
        return target
    if not (project.python_folder / "__init__.py").exists():
        raise FileNotFoundError(f"{project.python_folder} holds no __init__.py: there is no package to build")
    staging = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=out))
    staging.chmod(0o755)
    try:
        sources = {source.relative_to(project.python_folder): source for source in project.python_files()}
        if extension:
            sources.update(project.kernel_sources())
        for place, source in sources.items():
            copy = staging / place
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy)
        load_extension = f"\nfrom . import {namespace}  # noqa: F401\n" if extension else ""
        (staging / "_ops.py").write_text(OPS_HEAD + load_extension + OPS_BODY.format(namespace=namespace))
        if extension:
            shutil.copyfile(extension, staging / f"{namespace}.abi3.so")
        write_metadata(project, staging, namespace, "cuda" if extension else "cpu")
        stamp.parent.mkdir(exist_ok=True)
        stamp.unlink(missing_ok=True)
        replace_folder(staging, target)
        stamp.write_text(inputs)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def write_metadata(project: Project, folder: Path, namespace: str, backend: str) -> None:
    state = git_state(project.root)
    # The first entry is required and meant for kernel-builder's version; this build didn't use kernel-builder.
    provenance: dict = {"kernel-builder": {"version": "none (tools/build.py)"}}
    if state is not None:
        provenance["kernel"] = {"commit": state.commit, "dirty": state.dirty}
    archs = {"archs": project.cuda_archs} if backend == "cuda" else {}
    metadata = {
        "name": project.name,
        "id": namespace,
        "version": project.version,
        "kernels-minver": KERNELS_MINVER,
        "license": project.license,
        "python-depends": [],
        "kernel-depends": [],
        "backend": {"type": backend, **archs},
        "digest": {"algorithm": "sha256", "files": digest_of(folder).files},
        "provenance": provenance,
    }
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")


def digest_of(folder: Path):
    """The digest that the `kernels` package computes; it leaves out metadata.json, signatures and bytecode."""
    from kernels._rust import Digest, DigestAlgorithm

    return Digest.hash_variant(DigestAlgorithm.SHA256, folder)


def intact(folder: Path) -> bool:
    """Whether the variant matches its own digest."""
    from kernels._rust import DigestValidationError, Metadata

    metadata = folder / "metadata.json"
    if not metadata.exists():
        return False
    try:
        Metadata.read_from_file(metadata).digest.validate(digest_of(folder))
    except (DigestValidationError, ValueError):
        return False
    return True


@contextmanager
def locked(out: Path):
    """Several processes (test workers) may build at once; the second finds the first one's result."""
    out.mkdir(parents=True, exist_ok=True)
    with open(out / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def replace_folder(new: Path, target: Path) -> None:
    """A folder can't be renamed over a full one, so the old one steps aside first."""
    if target.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
        target.rename(old / target.name)
        new.rename(target)
        shutil.rmtree(old)
    else:
        new.rename(target)


def main() -> None:
    parser = argparse.ArgumentParser(description="Build hub variants without Nix.")
    parser.add_argument("variant", choices=["cpu", "cuda", "all"])
    parser.add_argument("--out", type=Path, default=Path("build"), help="folder for the variants (default: build)")
    options = parser.parse_args()
    project, out = load_project(), options.out.resolve()
    if options.variant in ("cpu", "all"):
        print(build_cpu(project, out))
    if options.variant in ("cuda", "all"):
        print(build_cuda(project, out))


if __name__ == "__main__":
    main()
