"""Write the capability table into README.md and CARD.md, between its markers.

    python tools/readme_table.py [--check]

The table comes from the package's own data, so the documents can't claim what the code refuses. --check changes nothing
and exits with 1 when a file is stale.
"""

import argparse
import importlib.util
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import build
from project import ROOT, load_project

DOCUMENTS = ("README.md", "CARD.md")
BEGIN, END = "<!-- capabilities: begin -->", "<!-- capabilities: end -->"


def with_table(text: str, table: str) -> str:
    """`text` with what stands between the markers replaced."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"expected the markers {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{table.strip()}\n{END}{after}"


def load_variant(folder: Path):
    """Import a variant folder as m3_sparse."""
    if "m3_sparse" in sys.modules:
        return sys.modules["m3_sparse"]
    spec = importlib.util.spec_from_file_location(
        "m3_sparse", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    module = sys.modules["m3_sparse"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def stale_documents(table: str) -> dict[Path, str]:
    """The documents whose table differs, with the text that they should have."""
    found = {}
    for name in DOCUMENTS:
        path = ROOT / name
        text = path.read_text()
        if (wanted := with_table(text, table)) != text:
            found[path] = wanted
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the capability table into the documents.")
    parser.add_argument("--check", action="store_true", help="change nothing, fail when a document is stale")
    options = parser.parse_args()
    module = load_variant(build.build_cpu(load_project(), ROOT / "build"))
    stale = stale_documents(module.capabilities().markdown())
    for path, text in stale.items():
        print(f"{path.name}: {'stale' if options.check else 'updated'}")
        if not options.check:
            path.write_text(text)
    return int(options.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
