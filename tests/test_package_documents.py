"""The documents and examples hold what the code does: tables, card, quickstart, demo."""

import os
import re
import subprocess
import sys
from pathlib import Path

import publish
import pytest
import readme_table
import reliability
import torch
import yaml

ROOT = Path(__file__).resolve().parent.parent


def run_example(*command):
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_capability_tables_are_current():
    import m3_sparse

    stale = readme_table.stale_documents(m3_sparse.capabilities().markdown())
    assert not stale, f"{[path.name for path in stale]}: run python tools/readme_table.py"


def test_table_needs_both_markers():
    table = readme_table.with_table(f"a\n{readme_table.BEGIN}\nold\n{readme_table.END}\nb", "new")
    assert table == f"a\n{readme_table.BEGIN}\nnew\n{readme_table.END}\nb"
    with pytest.raises(ValueError, match="markers"):
        readme_table.with_table(f"{readme_table.BEGIN} only", "new")


def test_card_renders(project):
    card = publish.render_card(project)
    front, body = card.split("---\n")[1], card.split("---\n", 2)[2]
    assert yaml.safe_load(front) == {"library_name": "kernels", "license": "apache-2.0"}
    import m3_sparse

    for name in m3_sparse.__all__:
        assert name == "layers" or f"- `{name}`" in body
    assert "{" not in body.replace("{py", "")


def test_card_needs_a_literal_list_of_names(tmp_path):
    (tmp_path / "m.py").write_text("names = []\n")
    with pytest.raises(ValueError, match="__all__"):
        publish.public_names(tmp_path / "m.py")


def test_quickstart_runs(cpu_variant):
    out = run_example("examples/quickstart.py")
    assert "blocks: [0, 1]" in out or "blocks: [1, 0]" in out
    assert "output: (1, 16, 128) torch.bfloat16" in out


def test_quickstart_in_the_readme_runs():
    """With the module at hand instead of the published one."""
    import m3_sparse

    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (code,) = [block for block in blocks if "block_table" in block]
    code, replaced = re.subn(r"^(from kernels import.*|m3_sparse = get_kernel\(.*\))$", "", code, flags=re.MULTILINE)
    assert replaced == 2
    names = {"m3_sparse": m3_sparse}
    exec(code, names)  # noqa: S102  the README's example
    assert names["out"].shape == (1, 16, 128) and torch.isfinite(names["out"]).all()


def test_demo_runs(cpu_variant):
    """The whole demo, with a shorter long prompt."""
    out = run_example("examples/demo.py", "--tokens", "2048")
    assert "tokens agree: yes, 32 of 32" in out
    assert re.search(r"m3_sparse +[\d,]+ MiB  measured", out) and re.search(r"eager +384 MiB  computed", out)


def test_the_table_of_reliability_is_of_the_figures():
    assert reliability.DOCUMENT.read_text() == reliability.text(), "run python tools/reliability.py"


def written(path):
    """A document without its code blocks, whose brackets are no links."""
    return re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)


DOCUMENTS = [ROOT / "README.md", ROOT / "CARD.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_links_lead_somewhere():
    """Relative links of the documents, with their anchors."""
    found = 0
    for path in DOCUMENTS:
        for target in re.findall(r"\]\(([^)\s]+)\)", written(path)):
            if re.match(r"[a-z]+:", target):
                continue
            found += 1
            file, _, anchor = target.partition("#")
            there = (path.parent / file).resolve() if file else path
            assert there.exists(), f"{path.name}: {target}"
            if anchor:
                titles = re.findall(r"^#+ (.*)$", written(there), re.MULTILINE)
                slugs = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
                assert anchor in slugs, f"{path.name}: {target}"
    assert found > 50


def test_links_of_the_card_are_published_with_it():
    """The Hub's page stands alone, but for the plots that publish.py puts beside it."""
    for target in re.findall(r"\]\(([^)\s]+)\)", written(ROOT / "CARD.md")):
        assert re.match(r"https?:|docs/figures/\w+\.svg$", target), target


def test_every_page_is_in_the_index():
    docs = ROOT / "docs"
    listed = re.findall(r"^- \[.*?\]\((.*?)\): ", (docs / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(
        [*(path.name for path in docs.glob("*.md") if path.stem != "README"), "measurements"]
    )


def test_commands_in_the_documents_exist():
    """Targets of make, and files that python is to run."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    found = set()
    for path in DOCUMENTS:
        text = path.read_text()
        named = re.findall(r"(?:^|`)make ([a-z]+)", text, re.MULTILINE)
        assert set(named) <= targets, f"{path.name}: make {set(named) - targets}"
        files = re.findall(
            r"(?:^|[` ])python ((?:tools|tests|benchmarks|examples|kernel-src)/[\w/.-]+\.py)", text, re.MULTILINE
        )
        for file in files:
            assert (ROOT / file).exists(), f"{path.name}: python {file}"
        found |= {*named, *files}
    assert {"demo", "test", "build", "benchmarks/run.py"} <= found
