"""Execute examples/m3_sparse.ipynb in place and keep its outputs, on the CPU in a minute or two.

    python tools/run_notebook.py [--out FILE]

What differs from run to run for no reason a reader has (warnings on stderr, execution times, counters) is left out.
"""

import argparse
import os
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from project import ROOT

NOTEBOOK = ROOT / "examples" / "m3_sparse.ipynb"
LONGEST_CELL = 600  # seconds


def execute(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The notebook with the outputs of a new run, which takes place in examples/."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    folder = {"metadata": {"path": str(NOTEBOOK.parent)}}
    NotebookClient(notebook, timeout=LONGEST_CELL, kernel_name="python3", resources=folder).execute()
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
        cell.metadata.clear()
        if cell.cell_type != "code":
            continue
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        for output in cell.outputs:
            if "image/png" in output.get("data", {}):
                output.data.pop("text/plain", None)
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return notebook


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=NOTEBOOK)
    out = parser.parse_args().out
    nbformat.write(execute(nbformat.read(NOTEBOOK, 4)), out)


if __name__ == "__main__":
    main()
