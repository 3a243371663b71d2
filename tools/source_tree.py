"""Write the tree that kernel-builder builds from.

    python tools/source_tree.py [--out build/source]

kernel-builder compiles C++ but can't run CuTe-DSL, and the cubins aren't committed. So this command exports the kernels
and lays out, in one folder, build.toml, the flake, the card, the Python package and every source that build.toml names,
among them the cubins as C++ arrays. tools/build.py compiles the same tree, so both ways see the same sources.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from project import GENERATED, Project, load_project

# Where the exporter's C++ files lie in the tree; build.toml lists them under this folder.
GENERATED_FOLDER = "generated"
TOP_FILES = ("build.toml", "flake.nix", "flake.lock", "CARD.md", "LICENSE", "NOTICE")


def export_kernels(project: Project, out: Path) -> Path:
    """Compile what changed to cubins; returns the folder of their C++ form."""
    kernels, generated = out / "kernels", out / GENERATED_FOLDER
    for script, arguments in (
        ("export.py", ["--out", kernels]),
        ("embed.py", ["--kernels", kernels, "--out", generated]),
    ):
        command = [sys.executable, project.root / "kernel-src" / script, *arguments]
        # Progress goes to stderr: stdout carries the resulting paths.
        subprocess.run([str(part) for part in command], check=True, stdout=sys.stderr)
    return generated


def write_source_tree(project: Project, generated: Path, tree: Path) -> Path:
    """Make `tree` hold exactly the sources; files that didn't change keep their time, so nothing is recompiled."""
    wanted = {Path(name): project.root / name for name in TOP_FILES}
    for path in (project.root / "benchmarks").glob("*.py"):
        wanted[path.relative_to(project.root)] = path
    for path in (project.root / "torch-ext").rglob("*"):
        if path.suffix in (".py", ".cpp", ".h") and path.name not in GENERATED:
            wanted[path.relative_to(project.root)] = path
    package = project.python_folder.relative_to(project.root)
    wanted.update({package / name: path for name, path in project.kernel_sources().items()})
    for path in generated.glob("*.[ch]*"):
        wanted[Path(GENERATED_FOLDER) / path.name] = path
    missing = [name for name in project.cuda_sources if Path(name) not in wanted]
    if missing:
        raise FileNotFoundError(f"build.toml names sources that don't exist: {', '.join(missing)}")
    for path in [path for path in tree.rglob("*") if path.is_file()]:
        # registration.h is the compiling tool's, which may have written it here already.
        if path.relative_to(tree) not in wanted and path.name not in GENERATED:
            path.unlink()
    for name, source in wanted.items():
        copy_changed(source, tree / name)
    return tree


def copy_changed(source: Path, target: Path) -> None:
    data = source.read_bytes()
    if target.exists() and target.read_bytes() == data:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".partial")
    partial.write_bytes(data)
    shutil.copymode(source, partial)
    os.replace(partial, target)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the tree that kernel-builder builds from.")
    parser.add_argument("--out", type=Path, default=Path("build/source"), help="(default: build/source)")
    tree = parser.parse_args().out.resolve()
    project = load_project()
    generated = export_kernels(project, tree.parent)
    print(write_source_tree(project, generated, tree))


if __name__ == "__main__":
    main()
