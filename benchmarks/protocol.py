"""How every benchmark here times a call, and where its rows go.

A case is one CUDA graph of calls over input sets that together exceed twice the L2 ("cold"), or of one input set again
and again ("warm"); the figure is the median over 25 replays of (graph time / calls), 9 where a call takes more than 5 ms.
The limit is bytes over the copy bandwidth (read + written) measured in the same run.
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
LONG, LONG_REPLAYS = 5000, 9  # microseconds of a call, from which on fewer replays do
WARM_US = 100_000  # of a graph of warm calls, at most
KEY = ("op", "impl", "dtype", "heads", "batch", "q_len", "kv_len", "selection", "page", "device", "backend")


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
    if total > LONG * len(input_sets):
        replays = min(replays, LONG_REPLAYS)
    input_sets = _lengthened(input_sets, total)
    return statistics.median(_replay(call, input_sets, replays)) / len(input_sets)


def _lengthened(input_sets, total):
    """The sets several times where a graph of them takes only `total` microseconds."""
    short = total < SHORT_GRAPH and len(input_sets) < LEAST_CALLS
    return input_sets * -(-LEAST_CALLS // len(input_sets)) if short else input_sets


def _replay(call, input_sets, replays):
    """Microseconds of each replay of a graph of these calls."""
    graph = _graph(call, input_sets)
    return [_time(graph) for _ in range(replays + 3)][3:]


def _graph(call, input_sets):
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for inputs in input_sets:
            call(*inputs)
    return graph


def _time(graph):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000


def cold_and_warm(call, input_sets):
    cold = graph_time(call, input_sets)
    calls = min(max(20, min(100, len(input_sets))), max(3, int(WARM_US / cold)))
    return cold, graph_time(call, input_sets[:1] * calls)


def in_turns(calls, input_sets, rounds=REPLAYS):
    """Median microseconds a call of each of `calls`: a graph each over the input sets, replayed in turns, every other
    round backwards, so that neither the card's temperature nor the order favours one."""
    for call in calls:
        for inputs in input_sets[:2]:
            call(*inputs)
    input_sets = _lengthened(input_sets, statistics.median(_replay(calls[0], input_sets, 3)))
    graphs = [_graph(call, input_sets) for call in calls]
    times = [[] for _ in calls]
    for i in range(rounds + 2):
        order = range(len(calls)) if i % 2 else reversed(range(len(calls)))
        for which in order:
            times[which].append(_time(graphs[which]))
    return [statistics.median(t[2:]) / len(input_sets) for t in times]


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


def matmul_rate():
    """TFLOP/s of cuBLAS, bf16, 8192^3: the median of 5, each behind a write of 256 MiB. In a row they are slower, the card
    then lowers its clock, and that would be no limit for a call by itself."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    out, flush = torch.empty_like(a), torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    torch.mm(a, a, out=out)
    graph, times = _graph(lambda: torch.mm(a, a, out=out), [()]), []
    for _ in range(6):
        flush.zero_()
        times.append(_time(graph))
    return 2 * 8192**3 / statistics.median(times[1:]) / 1e6


def row(bandwidth, cold, warm, size, flops, **key):
    """One result; `key` are the fields of KEY, times in microseconds. Device and backend are the GPU and "aot" (None for
    peers) unless given, so that figures of another device or backend are other rows."""
    where = {"device": torch.cuda.get_device_name()} if "device" not in key else {}
    where["backend"] = "aot" if key["impl"].startswith("ours") else None
    return {
        **{name: {**where, **key}.get(name) for name in KEY},
        "ms_cold": round(cold / 1000, 5),
        "ms_warm": round(warm / 1000, 5),
        "limit_ms": round(size / bandwidth / 1e6, 7),
        "bytes": size,
        "flops": flops,
        "commit": variant_commit(),
        "date": datetime.date.today().isoformat(),
    }


def weighted_means(label, done):
    """Of [(weight, {impl: (cold, warm)}, figures)], a list of cases: ({impl: means}, means of the figures). An
    implementation that didn't serve every case has no mean."""
    total = sum(weight for weight, _, _ in done)

    def mean(values):
        return sum(weight * value for (weight, _, _), value in zip(done, values)) / total

    times = {}
    for impl in {name: None for _, found, _ in done for name in found}:
        pairs = [found.get(impl) for _, found, _ in done]
        if None in pairs:
            print(f"{label}: {impl} served {len(pairs) - pairs.count(None)} of {len(pairs)} cases, no mean", flush=True)
        else:
            times[impl] = tuple(mean(column) for column in zip(*pairs))
    return times, [mean(column) for column in zip(*(figures for _, _, figures in done))]


def weighted_cases(path):
    """The cases of a file that have a weight."""
    return [case for case in json.loads(path.read_text())["cases"] if case.get("selection") == "representative"]


def merge_rows(path, rows):
    """Rows replace those of the same key in the file and are added otherwise. Without a path, nothing."""
    if path is None:
        return
    old = json.loads(path.read_text()) if path.exists() else []
    merged = {tuple(r[name] for name in KEY): r for r in old}
    merged.update({tuple(r[name] for name in KEY): r for r in rows})
    path.parent.mkdir(parents=True, exist_ok=True)
    text = ",\n".join(json.dumps(merged[key]) for key in sorted(merged, key=lambda k: tuple(map(str, k))))
    whole = path.with_name(path.name + ".part")  # an interruption leaves the old file
    whole.write_text("[\n" + text + "\n]\n")
    whole.replace(path)


def print_table(rows, columns, bandwidth):
    """us, GB/s and share of the copy bandwidth of each row."""
    print(" | ".join([*columns, "us cold", "us warm", "GB/s", "% of copy", "limit us"]))
    for r in rows:
        rate = r["bytes"] / r["ms_cold"] / 1e6
        figures = [f"{r['ms_cold'] * 1000:.2f}", f"{r['ms_warm'] * 1000:.2f}", f"{rate:.0f}"]
        figures += [f"{100 * rate / bandwidth:.0f}", f"{r['limit_ms'] * 1000:.2f}"]
        print(" | ".join([*(str(r[c]) for c in columns), *figures]))
