"""A second copy of the built package in one process: another module name and another operator namespace."""

import importlib.util
import re
import shutil
import sys


def copy_variant(source, target, suffix):
    """Copy a variant folder under a namespace of its own, as another version of the package would have."""
    shutil.copytree(source, target)
    namespace = re.search(r"torch\.ops\.(\w+)", (target / "_ops.py").read_text())[1]
    for name in ("_ops.py", "metadata.json"):
        file = target / name
        file.write_text(file.read_text().replace(namespace, namespace + suffix))
    return target


def import_variant(folder, name):
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def forget(name):
    for module in [module for module in sys.modules if module == name or module.startswith(f"{name}.")]:
        del sys.modules[module]
