"""Write what benchmarks/results/h200.json says into the documents: tables of README.md and CARD.md, plots in docs/figures.

    python tools/figures.py [--check]

Plots need matplotlib, tables and --check don't. Each plot carries the digest of the points it was drawn from; --check
changes nothing and exits with 1 where a table differs from the rows, or a plot's digest from that of their points. Rows
that the file doesn't have are left out.
"""

import argparse
import hashlib
import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from project import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "h200.json"
FIGURES = ROOT / "docs" / "figures"
DOCUMENTS = ("README.md", "CARD.md")
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
PEERS = {
    "flashinfer-cake": "FlashInfer",
    "flashinfer-cute": "FlashInfer, CuTe DSL",
    "vllm-triton": "vLLM",
    "flash-attn-4": "flash-attn-4",
    "torch-cudnn": "cuDNN, unpaged",
    "torch-flash": "torch's flash, unpaged",
    "torch.compile": "torch.compile",
}
COLOURS = {"ours": "#d62728", "flashinfer-cake": "#2ca02c", "flashinfer-cute": "#1f77b4", "vllm-triton": "#9467bd"}

# ---- tables: what -> (op, dtype, heads, batch, q_len, kv_len), a column a selection

KV32, KV128 = 32768, 131072
BOTH = ("random", "correlated")
LINES = [
    ("decode step, 64 requests at 32,768 tokens: store, select, attend", "step", "bf16", "64/4", 64, 1, KV32, (None,)),
    ("the same, e4m3 caches", "step", "fp8", "64/4", 64, 1, KV32, (None,)),
    ("decode step of 1 request at 32,768 tokens", "step", "bf16", "64/4", 1, 1, KV32, (None,)),
    ("decode attention, 64 requests at 32,768", "decode", "bf16", "64/4", 64, 1, KV32, ("random",)),
    ("decode attention, e4m3, 16 requests", "decode", "fp8", "64/4", 16, 1, KV32, ("random",)),
    ("decode attention, e4m3, 256 requests", "decode", "fp8", "64/4", 256, 1, KV32, ("random",)),
    ("decode selection, 64 requests at 131,072", "select", "bf16", "4", 64, 1, KV128, (None,)),
    ("decode selection, e4m3 keys, 64 requests at 131,072", "select", "fp8", "4", 64, 1, KV128, (None,)),
    ("prefill attention, 32,768 tokens", "prefill", "bf16", "64/4", 1, KV32, KV32, BOTH),
    ("the same, e4m3 caches", "prefill", "fp8", "64/4", 1, KV32, KV32, BOTH),
    ("prefill attention, 4,096 new tokens at 131,072", "prefill", "bf16", "64/4", 1, 4096, KV128, BOTH),
    ("the same, e4m3 caches", "prefill", "fp8", "64/4", 1, 4096, KV128, BOTH),
    ("prefill attention, 512 new tokens at 65,536", "prefill", "bf16", "64/4", 1, 512, 65536, BOTH),
    ("prefill attention, weighted cases", "prefill", "bf16", "64/4", None, None, None, BOTH),
    ("the same, e4m3 caches", "prefill", "fp8", "64/4", None, None, None, BOTH),
    ("prefill selection, 32,768 tokens", "select", "bf16", "4", 1, KV32, KV32, (None,)),
    ("the same, e4m3 queries and keys", "select", "fp8q", "4", 1, KV32, KV32, (None,)),
    ("prefill selection, 4,096 new tokens at 131,072", "select", "bf16", "4", 1, 4096, KV128, (None,)),
    ("prefill selection, weighted cases", "select", "bf16", "4", None, None, None, (None,)),
    ("one layer's selection and attention, prompt of 131,072 tokens", "layer", "bf16", "64/4", 1, KV128, KV128, ("indexer",)),
    ("dense attention, causal prefill of 8,192 tokens", "dense", "bf16", "64/4", 1, 8192, 8192, ("causal",)),
    ("dense attention, decode of 64 requests at 32,768", "dense", "bf16", "64/4", 64, 1, KV32, ("causal",)),
]  # fmt: skip


def duration(ms: float) -> str:
    """Three digits, in us below a millisecond."""
    value, unit = (ms, "ms") if ms >= 1 else (ms * 1000, "us")
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f} {unit}"


def best_peer(rows: list[dict]) -> dict | None:
    others = [r for r in rows if not r["impl"].startswith("ours") and not r["impl"].endswith("score")]
    return min(others, key=lambda r: r["ms_cold"], default=None)


def table(rows: list[dict]) -> str:
    lines = ["| what | ours | limit | best peer measured |", "| --- | --- | --- | --- |"]
    for what, op, dtype, heads, batch, q_len, kv_len, kinds in LINES:
        key = (op, dtype, heads, batch, q_len, kv_len)
        ours, limits, peers = [], [], []
        for kind in kinds:
            names = ("op", "dtype", "heads", "batch", "q_len", "kv_len")
            same = [r for r in rows if tuple(r[n] for n in names) == key and r["selection"] == kind]
            mine = next((r for r in same if r["impl"] == "ours"), None)
            if mine is None:
                continue
            peer = best_peer(same)
            ours.append(duration(mine["ms_cold"]))
            limits.append(duration(mine["limit_ms"]))
            peers.append(f"{duration(peer['ms_cold'])} ({PEERS[peer['impl']]})" if peer else "-")
        if ours:
            selections = f", {' / '.join(kinds)} selections" if len(ours) == 2 else ""
            cells = [
                " / ".join(dict.fromkeys(column) if column is not ours else column) for column in (ours, limits, peers)
            ]
            lines.append(" | ".join([f"| {what}{selections}", *cells]) + " |")
    return "\n".join(lines)


def with_table(text: str, wanted: str) -> str:
    """`text` with what stands between the markers replaced."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"expected the markers {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{wanted}\n{END}{after}"


# ---- plots: panels of series of (kv_len, ms)


def series(rows, op, dtype, impl, kind, batch, q_len) -> dict:
    """Time and limit over the context; a q_len of None stands for whole prompts."""
    fits = [
        r
        for r in rows
        if (r["op"], r["dtype"], r["impl"], r["selection"], r["batch"]) == (op, dtype, impl, kind, batch)
        and r["heads"] in ("64/4", "4")
        and r["kv_len"] is not None
        and r["q_len"] == (r["kv_len"] if q_len is None else q_len)
    ]
    fits = sorted(fits, key=lambda r: r["kv_len"])
    return {
        "points": [(r["kv_len"], r["ms_cold"]) for r in fits],
        "limit": [(r["kv_len"], r["limit_ms"]) for r in fits],
    }


def panel(rows, title, op, dtypes, kinds, batch, q_len) -> dict:
    found = {}
    for dtype in dtypes:
        for impl in COLOURS:
            for kind in kinds:
                if (one := series(rows, op, dtype, impl, kind, batch, q_len))["points"]:
                    found[f"{impl}|{dtype}|{kind or ''}"] = one
    return {"title": title, "series": found}


def plots(rows: list[dict]) -> dict[str, list[list[dict]]]:
    """Name of a plot -> rows of panels."""
    made = {"prefill": [], "decode": []}
    for dtype, words, selecting in (("bf16", "bf16", ("bf16",)), ("fp8", "e4m3 caches", ("fp8", "fp8q"))):
        made["prefill"].append([
            panel(rows, f"attention, whole prompt, {words}", "prefill", (dtype,), BOTH, 1, None),
            panel(rows, f"selection, whole prompt, {words}", "select", selecting, (None,), 1, None),
            panel(rows, f"attention, 4,096 new tokens, {words}", "prefill", (dtype,), BOTH, 1, 4096),
            panel(rows, f"selection, 4,096 new tokens, {words}", "select", selecting, (None,), 1, 4096),
        ])  # fmt: skip
        made["decode"].append([
            panel(rows, f"attention, 64 requests, {words}", "decode", (dtype,), ("random",), 64, 1),
            panel(rows, f"selection, 64 requests, {words}", "select", (dtype,), (None,), 64, 1),
        ])  # fmt: skip
    return made


def digest(panels: list[list[dict]]) -> str:
    return hashlib.sha256(json.dumps(panels, sort_keys=True).encode()).hexdigest()[:24]


def drawn_from(path: Path) -> str | None:
    """The digest in a plot."""
    found = re.search(r"points ([0-9a-f]{24})", path.read_text()) if path.exists() else None
    return found and found[1]


def draw(name: str, panels: list[list[dict]]) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 9})
    from matplotlib import pyplot
    from matplotlib.ticker import FixedLocator, NullLocator

    height, width = len(panels), len(panels[0])
    figure, axes = pyplot.subplots(height, width, figsize=(3.4 * width + 0.6, 2.9 * height + 0.6), squeeze=False)
    handles = {}
    for row, axis_row in zip(panels, axes):
        for one, axis in zip(row, axis_row):
            ticks = set()
            for key, found in one["series"].items():
                impl, dtype, kind = key.split("|")
                name_of = "m3-sparse" if impl == "ours" else PEERS[impl]
                label = (
                    name_of
                    + (", correlated" if kind == "correlated" else "")
                    + (", e4m3 queries" if dtype == "fp8q" else "")
                )
                dashes = ":" if dtype == "fp8q" else "--" if kind == "correlated" else "-"
                style = {"color": COLOURS[impl], "linestyle": dashes, "marker": "o", "markersize": 3, "linewidth": 1.3}
                handles[label] = axis.plot(*zip(*found["points"]), label=label, **style)[0]
                if impl == "ours" and kind != "correlated":
                    limit = axis.plot(*zip(*found["limit"]), color="black", linestyle=dashes, linewidth=0.8)[0]
                    handles["limit" + (", e4m3 queries" if dtype == "fp8q" else "")] = limit
                ticks |= {x for x, _ in found["points"]}
            axis.set(xscale="log", yscale="log", title=one["title"], xlabel="tokens of context", ylabel="ms")
            axis.title.set_fontsize(9)
            axis.xaxis.set_major_locator(FixedLocator(sorted(ticks)))
            axis.xaxis.set_minor_locator(NullLocator())
            axis.set_xticklabels([f"{x // 1024}k" if x < 1 << 20 else f"{x >> 20}M" for x in sorted(ticks)])
            axis.grid(alpha=0.3, linewidth=0.4)
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncols=5, fontsize=8, frameon=False)
    FIGURES.mkdir(parents=True, exist_ok=True)
    metadata = {"Date": None, "Description": f"points {digest(panels)}"}
    figure.savefig(FIGURES / f"{name}.svg", metadata=metadata)
    pyplot.close(figure)


def stale(rows: list[dict]) -> list[str]:
    """What doesn't say what the rows say."""
    wanted = table(rows)
    found = [name for name in DOCUMENTS if with_table(text := (ROOT / name).read_text(), wanted) != text]
    return found + [
        name for name, panels in plots(rows).items() if drawn_from(FIGURES / f"{name}.svg") != digest(panels)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the measured tables and draw the plots.")
    parser.add_argument("--check", action="store_true", help="change nothing, fail when something is stale")
    options = parser.parse_args()
    rows = json.loads(RESULTS.read_text())
    for name in (found := stale(rows)):
        print(f"{name}: {'stale' if options.check else 'updated'}")
        if options.check:
            continue
        if name in DOCUMENTS:
            path = ROOT / name
            path.write_text(with_table(path.read_text(), table(rows)))
        else:
            draw(name, plots(rows)[name])
    return int(options.check and bool(found))


if __name__ == "__main__":
    sys.exit(main())
