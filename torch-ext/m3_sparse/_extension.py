"""The compiled extension's file, looked at before the system's loader maps it.

A library that is cut short kills the process while it is being loaded, and one with a wrong byte among its kernels
computes something else; the clients check neither. The metadata that was built with it knows its digest.
"""

import base64
import contextlib
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parent
REMEDY = (
    f"The copy in {FOLDER} is damaged or incomplete: delete that folder (with the Hub's client, the repository's folder in "
    "its cache) and fetch the kernel again"
)


def check(folder: Path = FOLDER) -> None:
    """Every library of the variant has the digest that metadata.json names for it; ImportError says which one has not.

    Without metadata.json, or without digests in it, there is nothing to compare with.
    """
    metadata = folder / "metadata.json"
    if not metadata.exists():
        return
    try:
        digest = json.loads(metadata.read_text()).get("digest") or {}
    except ValueError as error:
        raise ImportError(f"m3_sparse: {metadata.name} can't be read ({error}). {REMEDY}") from error
    if digest.get("algorithm") != "sha256":
        return
    for name, expected in digest["files"].items():
        if not name.endswith(".so"):
            continue
        library = folder / name
        if not library.is_file():
            raise ImportError(f"m3_sparse: {name} is missing. {REMEDY}")
        if hashlib.sha256(library.read_bytes()).digest() != base64.b64decode(expected):
            raise ImportError(f"m3_sparse: {name} doesn't match its digest. {REMEDY}")


def share(folder: Path = FOLDER) -> None:
    """A second copy of one build in a process (from the Hub's cache and beside it) takes the library of the first: its
    operators can be defined once only.
    """
    for library in folder.glob("*.so"):
        name = library.name.partition(".")[0]
        for module in [module for key, module in sys.modules.items() if key.endswith("." + name)]:
            sys.modules.setdefault(f"{__package__}.{name}", module)


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Checks the library, and says what to do where the system's loader refuses it."""
    check()
    share()
    try:
        yield
    except (ImportError, OSError) as error:
        import torch

        raise ImportError(
            f"m3_sparse: the compiled extension can't be loaded here: {error}. It needs Linux on the processor that the "
            f"variant's folder names ({FOLDER.name}), glibc 2.28 or newer and torch 2.11 or newer, and this is torch "
            f"{torch.__version__}: load the kernel with kernels.get_kernel, which picks the variant, or take the variant "
            "torch-cpu (backend='cpu')"
        ) from error


# Here, and this module first of all in the package: whoever imports the operators afterwards has them.
with loading():
    from . import _ops  # noqa: F401
