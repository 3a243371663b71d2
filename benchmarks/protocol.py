"""How every benchmark here times a call, and where its rows go.

A case is one CUDA graph of calls over input sets that together exceed twice the L2 ("cold"), or of one input set again
and again ("warm"); the figure is the median over replays of (graph time / calls). The limit is bytes over the copy
bandwidth (read + written) measured in the same run.
"""

import datetime
import importlib.util
import json
import statistics
import sys
from pathlib import Path

import torch

try:
    from kernels.benchmark import Benchmark
except ImportError:  # a script run by itself does without the kernels package
    Benchmark = object

COLD_BYTES = 120 << 20  # twice the L2 of an H200 and more
MOST_SETS = 512
LEAST_CALLS, SHORT_GRAPH = 16, 500  # calls in a graph of fewer microseconds
REPLAYS = 25
KEY = ("op", "impl", "dtype", "heads", "batch", "q_len", "kv_len", "selection", "page")


def load(variant):
    """The built variant in folder `variant` as the module m3_sparse."""
    location = Path(variant).resolve()
    spec = importlib.util.spec_from_file_location(
        "m3_sparse", location / "__init__.py", submodule_search_locations=[str(location)]
    )
    module = sys.modules["m3_sparse"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def variant_commit():
    """The commit that the measured variant was built from, as its metadata has it."""
    folder = Path(sys.modules["m3_sparse"].__file__).parent
    kernel = json.loads((folder / "metadata.json").read_text())["provenance"]["kernel"]
    return kernel["commit"][:7] + ("-dirty" if kernel["dirty"] else "")


def sets_for(size):
    """How many input sets of `size` bytes make a cold graph."""
    return min(MOST_SETS, max(2, -(-COLD_BYTES // max(size, 1))))


def graph_time(call, input_sets, replays=REPLAYS):
    """Median microseconds a call, over replays of one graph that goes through the input sets, several times if that is
    short: starting a graph takes microseconds."""
    for inputs in input_sets[:2]:
        call(*inputs)
    total = statistics.median(_replay(call, input_sets, 3))
    if total < SHORT_GRAPH and len(input_sets) < LEAST_CALLS:
        input_sets = input_sets * -(-LEAST_CALLS // len(input_sets))
    return statistics.median(_replay(call, input_sets, replays)) / len(input_sets)


def _replay(call, input_sets, replays):
    """Microseconds of each replay of a graph of these calls."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for inputs in input_sets:
            call(*inputs)
    times = []
    for _ in range(replays + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    return times[3:]


def cold_and_warm(call, input_sets):
    return graph_time(call, input_sets), graph_time(call, input_sets[:1] * max(20, min(100, len(input_sets))))


def copy_bandwidth():
    """GB/s of a 4 GiB device-to-device copy, bytes read and written; not in a graph, where copies are slower."""
    source = torch.empty(1 << 30, device="cuda").normal_()
    target = torch.empty_like(source)
    times = []
    for _ in range(20):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return 2 * source.numel() * 4 / statistics.median(times) / 1e6


def row(bandwidth, cold, warm, size, flops, **key):
    """One result; `key` are the fields of KEY, times in microseconds."""
    return {
        **{name: key.get(name) for name in KEY},
        "ms_cold": round(cold / 1000, 5),
        "ms_warm": round(warm / 1000, 5),
        "limit_ms": round(size / bandwidth / 1e6, 7),
        "bytes": size,
        "flops": flops,
        "commit": variant_commit(),
        "date": datetime.date.today().isoformat(),
    }


def merge_rows(path, rows):
    """Rows replace those of the same key in the file and are added otherwise."""
    old = json.loads(path.read_text()) if path.exists() else []
    merged = {tuple(r[name] for name in KEY): r for r in old}
    merged.update({tuple(r[name] for name in KEY): r for r in rows})
    path.parent.mkdir(parents=True, exist_ok=True)
    text = ",\n".join(json.dumps(merged[key]) for key in sorted(merged, key=lambda k: tuple(map(str, k))))
    path.write_text("[\n" + text + "\n]\n")


def print_table(rows, columns, bandwidth):
    """us, GB/s and share of the copy bandwidth of each row."""
    print(" | ".join([*columns, "us cold", "us warm", "GB/s", "% of copy", "limit us"]))
    for r in rows:
        rate = r["bytes"] / r["ms_cold"] / 1e6
        figures = [f"{r['ms_cold'] * 1000:.2f}", f"{r['ms_warm'] * 1000:.2f}", f"{rate:.0f}"]
        figures += [f"{100 * rate / bandwidth:.0f}", f"{r['limit_ms'] * 1000:.2f}"]
        print(" | ".join([*(str(r[c]) for c in columns), *figures]))
