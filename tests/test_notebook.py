"""examples/m3_sparse.ipynb: it runs on the CPU from get_kernel to its pictures, and what is committed is such a run."""

import re

import nbformat
import pytest
from run_notebook import NOTEBOOK, execute


def said(notebook):
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = "".join(output.text for output in outputs if output.output_type == "stream")
    return text, [output for output in outputs if "image/png" in output.get("data", {})], outputs


def check(notebook):
    text, pictures, outputs = said(notebook)
    assert "-> torch, by default" in text and "the same as stock eager: True" in text
    assert len(pictures) == 2 and not [output for output in outputs if output.output_type == "error"]
    picked, distinct = re.search(r"pick (\d+) blocks, ([\d.]+) of them distinct", text).groups()
    assert 4 <= float(distinct) < int(picked)
    assert len(re.findall(r"^ *[\d,]+ \| +[\d.]+ +[\d,]+ \| +[\d.]+ +[\d,]+$", text, re.MULTILINE)) == 3, (
        "the table of part 4"
    )


def test_committed_outputs_are_a_run_and_small():
    check(nbformat.read(NOTEBOOK, 4))
    assert NOTEBOOK.stat().st_size < 200_000
    assert not re.search(r"/(home|root|tmp|work)/", "".join(said(nbformat.read(NOTEBOOK, 4))[0]))


@pytest.mark.usefixtures("cpu_variant")
def test_runs_on_the_cpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("LOCAL_KERNELS", "HF_HUB_OFFLINE", "M3_SPARSE_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    notebook = nbformat.read(NOTEBOOK, 4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    check(execute(notebook))
