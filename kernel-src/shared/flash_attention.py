"""flash-attention-4's device code without its host code.

The packages' own __init__ import everything there is: the JIT interface, autotuners, torch.compile glue and through them
Triton. A kernel needs a few modules below them, so the packages are entered here as bare folders. Import this module
before anything of `flash_attn.cute` or `quack`.
"""

import importlib.metadata
import importlib.util
import sys
import types
from pathlib import Path

VERSION = "4.0.0b36"  # no API is promised between versions


def _enter(name, folder):
    if name not in sys.modules:
        package = types.ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package


def _folder(name):
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise ModuleNotFoundError(f"{name} is needed to compile this kernel: pip install -r requirements-test.txt")
    return Path(next(iter(spec.submodule_search_locations)))


if importlib.metadata.version("flash-attn-4") != VERSION:
    raise ImportError(f"expected flash-attn-4 {VERSION}, found {importlib.metadata.version('flash-attn-4')}")
_root = _folder("flash_attn")
_enter("quack", _folder("quack"))
_enter("flash_attn", _root)
_enter("flash_attn.cute", _root / "cute")
