"""Write the tables of capabilities and accuracy into README.md and CARD.md, that of determinism into README.md.

    python tools/readme_table.py [--check]

Each stands between its markers. The first comes from the package's own data, so the documents can't claim what the code
refuses; the second from what the property tests saw (docs/measurements); the third from determinism_table.py, whose
cells are tested. --check changes nothing and exits with 1 when a file is stale.
"""

import argparse
import importlib.util
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import build
import determinism_table
from project import ROOT, load_project

DOCUMENTS = ("README.md", "CARD.md")
MARKERS = "<!-- {0}: begin -->", "<!-- {0}: end -->"
BEGIN, END = (marker.format("capabilities") for marker in MARKERS)


def with_table(text: str, table: str, name: str = "capabilities") -> str:
    """`text` with what stands between the markers of that name replaced."""
    first, last = (marker.format(name) for marker in MARKERS)
    before, begin, rest = text.partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise ValueError(f"expected the markers {first} and {last}")
    return f"{before}{begin}\n{table.strip()}\n{end}{after}"


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


def accuracy() -> str:
    """The largest share of the stated error bound that the property tests saw, by operation and dtypes."""
    runs = json.loads((ROOT / "docs" / "measurements" / "2026-11-30-property.json").read_text())["runs"]
    places = {"aot on a GPU": "aot, H200", "torch": "torch, CPU"}
    seen: dict[tuple[str, str], dict[str, float]] = {}
    examples: dict[tuple[str, str], int] = {}
    for run in runs:
        if (place := places.get(run["backend"])) is None:
            continue
        examples[run["op"], place] = examples.get((run["op"], place), 0) + run["examples"]
        for what, share in run["largest"].items():
            result, detail = what.split(", ")
            # "decode bfloat16+float8_e4m3fn" is a formulation and dtypes; a score has dtypes alone.
            label = detail.replace("bfloat16", "bf16").replace("float16", "fp16").replace("float32", "fp32")
            label = label.replace("float8_e4m3fn", "e4m3").replace("float8_e5m2", "e5m2").split(" ")[-1]
            at = seen.setdefault((run["op"], f"{result}, {label}"), {})
            at[place] = max(share, at.get(place, 0.0))
    lines = ["| operation | result | " + " | ".join(places.values()) + " |", "| --- | --- | --- | --- |"]
    for op in sorted({op for op, _ in examples}):
        count = [f"{examples[op, place]:,} examples" if (op, place) in examples else "-" for place in places.values()]
        lines.append(f"| {op} | {'the exact bytes' if op == 'store_kv' else ''} | " + " | ".join(count) + " |")
        for (name, result), shares in sorted(seen.items()):
            if name == op and len(shares) == len(places) and not result.startswith("lse"):
                lines.append(
                    f"| | {result} | " + " | ".join(f"{shares[place]:.3f}" for place in places.values()) + " |"
                )
    return "\n".join(lines)


def stale_documents(table: str) -> dict[Path, str]:
    """The documents whose table differs, with the text that they should have."""
    found = {}
    tables = {"capabilities": table, "accuracy": accuracy()}
    places = dict.fromkeys(DOCUMENTS, tables) | {
        "README.md": {**tables, "determinism": determinism_table.markdown()},
    }
    for name, contents in places.items():
        path = ROOT / name
        wanted = text = path.read_text()
        for marker, content in contents.items():
            wanted = with_table(wanted, content, marker)
        if wanted != text:
            found[path] = wanted
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the tables into the documents.")
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
