"""What build.toml and git say about this project; every other tool reads it here."""

import hashlib
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import tomlkit

ROOT = Path(__file__).resolve().parent.parent
# The folders whose contents become part of a variant.
SOURCE_FOLDERS = ("torch-ext", "kernel-src")
GENERATED = {"_ops.py", "registration.h"}


@dataclass(frozen=True)
class GitState:
    """The commit that is checked out, its tree, and whether tracked files differ from it."""

    commit: str
    tree: str
    dirty: bool


@dataclass(frozen=True)
class Project:
    """build.toml, as far as the tools need it."""

    root: Path
    config: dict

    @property
    def name(self) -> str:
        return self.config["general"]["name"]

    @property
    def python_name(self) -> str:
        return self.name.replace("-", "_")

    @property
    def version(self) -> int:
        return self.config["general"]["version"]

    @property
    def license(self) -> str:
        return self.config["general"]["license"]

    @property
    def repo_id(self) -> str:
        return self.config["general"]["hub"]["repo-id"]

    @property
    def branch(self) -> str:
        """The branch that holds the builds; the clients look for version N on branch vN."""
        return self.config["general"]["hub"].get("branch", f"v{self.version}")

    @property
    def stable_abi(self) -> str:
        """The oldest torch that the CUDA extension runs on, such as "2.11"."""
        return self.config["torch"]["stable-abi"]["cuda"]

    @property
    def cuda_version(self) -> str:
        return self.config["general"]["cuda"]["minver"]

    @property
    def cuda_archs(self) -> list[str]:
        return sorted({arch for kernel in self.cuda_kernels for arch in kernel["cuda-capabilities"]})

    @property
    def cuda_kernels(self) -> list[dict]:
        return [kernel for kernel in self.config["kernel"].values() if kernel["backend"] == "cuda"]

    @property
    def cuda_sources(self) -> list[str]:
        """Everything that build.toml names for the extension, headers included, relative to the root."""
        return self.config["torch"]["src"] + [source for kernel in self.cuda_kernels for source in kernel["src"]]

    @property
    def python_folder(self) -> Path:
        return self.root / "torch-ext" / self.python_name

    def python_files(self) -> list[Path]:
        return sorted(path for path in self.python_folder.rglob("*.py") if path.name not in GENERATED)

    def kernel_sources(self) -> dict[str, Path]:
        """What the extension's kernels are compiled from, by its place in the package: the backend "jit" does it again."""
        folder = self.root / "kernel-src"
        return {f"kernel_src/{path.relative_to(folder).as_posix()}": path for path in sorted(folder.rglob("*.py"))}

    def operator_namespace(self, backend: str) -> str:
        """The torch.library namespace, which is also the metadata's id: unique to one state of the sources."""
        state = git_state(self.root)
        if state is None:
            return f"_{self.python_name}_{backend}_{hash_files(self.root, self.source_files())[:7]}"
        return f"_{self.python_name}_{backend}_{state.tree[:7]}{'_dirty' if state.dirty else ''}"

    def source_files(self) -> list[Path]:
        """The files that decide what a variant holds, for trees that are no git checkout."""
        folders = [self.root / name for name in SOURCE_FOLDERS]
        paths = [path for folder in folders for path in folder.rglob("*")]
        skipped = {"__pycache__"}
        found = [p for p in paths if p.is_file() and p.name not in GENERATED and not skipped & set(p.parts)]
        return sorted([*found, self.root / "build.toml"])


def load_project(root: Path = ROOT) -> Project:
    return Project(root, tomlkit.parse((root / "build.toml").read_text()).unwrap())


def git_state(root: Path) -> GitState | None:
    """None when `root` isn't the top of a git checkout that has a commit."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != root.resolve():
            return None
        commit, tree = git("rev-parse", "HEAD", "HEAD^{tree}").split()
        # Untracked files don't count, as in kernel-builder: generated sources are untracked.
        return GitState(commit, tree, dirty=bool(git("status", "--porcelain", "--untracked-files=no")))
    except (OSError, subprocess.CalledProcessError):
        return None


def hash_files(root: Path, paths: Iterable[Path], extra: str = "") -> str:
    """A sha256 over names and contents (and `extra`), independent of where `root` lies."""
    digest = hashlib.sha256(extra.encode())
    for path in sorted(paths):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()
