"""Publish the built variants as a kernel repository.

    python tools/publish.py [--repo ORG/NAME] [--build build]

Puts the variants and the benchmarks on the version's branch and the rendered card, as README.md, with its plots on main. Works against
the Hub, and against tools/hub_standin.py when HF_ENDPOINT points there. Publishing kernels on the Hub needs a token
with write access and the Hub's approval.
"""

import argparse
import ast
import sys
from pathlib import Path

import jinja2
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

sys.path.insert(0, str(Path(__file__).resolve().parent))

import build
from project import Project, load_project


def render_card(project: Project) -> str:
    """CARD.md as kernel-builder renders it: same variables, same treatment of line ends."""
    public = public_names(project.python_folder / "__init__.py")
    layers_file = project.python_folder / "layers.py"
    layers = class_names(layers_file) if "layers" in public and layers_file.exists() else []
    general = project.config["general"]
    template = jinja2.Environment(trim_blocks=True).from_string((project.root / "CARD.md").read_text())
    return template.render(
        repo_id=project.repo_id,
        version=project.version,
        license=project.license.lower(),
        functions=[name for name in public if name != "layers"],
        layers=layers,
        has_benchmark=(project.root / "benchmarks" / "benchmark.py").exists(),
        upstream=general.get("upstream"),
        source=general.get("source"),
    )


def public_names(path: Path) -> list[str]:
    """The literal list __all__, read without importing."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return list(ast.literal_eval(node.value))
    raise ValueError(f"{path.name} has no literal __all__")


def class_names(path: Path) -> list[str]:
    return [node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]


def find_variants(folder: Path) -> list[Path]:
    """The finished variants in a build folder, refused when one doesn't match its own digest."""
    variants = sorted(path.parent for path in folder.glob("torch*/metadata.json"))
    if not variants:
        raise FileNotFoundError(f"no built variant in {folder}: run tools/build.py first")
    broken = [variant.name for variant in variants if not build.intact(variant)]
    if broken:
        raise ValueError(f"variants that don't match their digest, build them again: {', '.join(broken)}")
    return variants


def repository_files(project: Project, folder: Path, variants: list[Path]) -> dict[str, Path]:
    """Path in the repository -> local file, for the version's branch."""
    files = {}
    for variant in variants:
        for path in variant.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                files[f"build/{path.relative_to(folder).as_posix()}"] = path
    # `kernels benchmark` runs every benchmarks/benchmark*.py of a repository; they import the other files beside them.
    for path in sorted((project.root / "benchmarks").glob("*.py")):
        files[f"benchmarks/{path.name}"] = path
    return files


def publish(project: Project, folder: Path, repo_id: str | None = None, api: HfApi | None = None) -> str:
    """Create what is missing and commit; returns the commit on the version's branch."""
    api, repo_id = api or HfApi(), repo_id or project.repo_id
    variants = find_variants(folder)
    files = repository_files(project, folder, variants)
    api.create_repo(repo_id, repo_type="kernel", exist_ok=True)
    api.create_branch(repo_id, repo_type="kernel", branch=project.branch, exist_ok=True)

    # A variant is replaced as a whole (an extra file fails the digest check); other machines' variants stay.
    replaced = tuple(f"build/{variant.name}/" for variant in variants) + ("benchmarks/",)
    existing = api.list_repo_files(repo_id, repo_type="kernel", revision=project.branch)
    stale = [path for path in existing if path.startswith(replaced) and path not in files]
    operations = [CommitOperationAdd(name, str(path)) for name, path in sorted(files.items())]
    operations += [CommitOperationDelete(path) for path in stale]
    commit = api.create_commit(
        repo_id, operations, repo_type="kernel", revision=project.branch, commit_message="Update the builds"
    )
    card = [CommitOperationAdd("README.md", render_card(project).encode())]
    for plot in sorted((project.root / "docs" / "figures").glob("*.svg")):
        card.append(CommitOperationAdd(plot.relative_to(project.root).as_posix(), str(plot)))
    api.create_commit(repo_id, card, repo_type="kernel", revision="main", commit_message="Update the card")
    return commit.oid


def main() -> None:
    parser = argparse.ArgumentParser(description="Publish the built variants as a kernel repository.")
    parser.add_argument("--repo", metavar="ORG/NAME", help="(default: build.toml's repo-id)")
    parser.add_argument("--build", type=Path, default=Path("build"), help="folder of the variants (default: build)")
    options = parser.parse_args()
    project = load_project()
    commit = publish(project, options.build.resolve(), options.repo)
    print(f"{options.repo or project.repo_id}, branch {project.branch}: {commit}")


if __name__ == "__main__":
    main()
