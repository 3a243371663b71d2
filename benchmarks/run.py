"""Runs the benchmarks, all or some, and says how far each figure is from its limit and from a stored run's.

    python benchmarks/run.py --variant V [--results FILE] [--against FILE] [--threshold 15] [--only PART ...] [--list]
        [--prefill-cases FILE] [--decode-cases FILE]           every figure, on a GPU
    python benchmarks/run.py --smoke [--variant V]             every benchmark once, small; without a GPU too

A part is one call of a benchmark script (on a GPU) or one workload of its class (--smoke). The rows of finished parts
are in FILE.running, their names in FILE.state: the same command, given again after an interruption, goes on with the part
that was cut, or with those that failed. At the end the rows go to the results file, where they replace those of the same
key (benchmarks.md). Device and backend are in the key, so a figure of the CPU or of the torch backend never stands for, or
is compared with, one of a GPU's kernels.

--against compares with the rows of the same key in a stored run. A regression is a cold time more than --threshold
percent (15, what one shape's time differs by from run to run and card to card) and more than a microsecond above it.
Exit status: 0; 1 with a regression; 2 if a part failed, which doesn't stop the others.

--smoke times by wall clock, calls and synchronisation included, after each workload's answer was compared with plain
torch: it shows that everything runs, its figures are rough.
"""

import argparse
import contextlib
import hashlib
import importlib
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

import protocol

try:
    from tqdm import tqdm
except ImportError:  # a bare GPU machine: a line a part
    tqdm = None

HERE = Path(__file__).resolve().parent
THRESHOLD, LEAST_US = 15, 1.0
SMOKE_SECONDS = 0.3  # of repetitions of a workload


def has_transformers():
    if importlib.util.find_spec("transformers"):
        return True
    print("layer: left out, transformers isn't installed", flush=True)
    return False


class Part(NamedTuple):
    name: str
    run: Callable  # (results file) -> None


# ---- parts on a GPU


def gpu_parts(options, log):
    """One a call of a script, the short ones first."""
    scripts = [
        ("step", "benchmark.py", []),
        ("store", "benchmark_store.py", []),
        ("merge", "benchmark_combine.py", []),
        ("decode", "benchmark_decode.py", []),
        ("select decode", "benchmark_select.py", ["--only", "decode"]),
        ("select prefill", "benchmark_select.py", ["--only", "prefill"]),
        ("dense", "benchmark_dense.py", []),
        ("prefill", "benchmark_prefill.py", []),
        ("prefill curve", "benchmark_prefill.py", ["--skip-table", "--curve"]),
    ]
    if has_transformers():
        scripts.append(("layer", "benchmark_layer.py", []))
    if torch.cuda.device_count() > 1:
        scripts.append(("tensor_parallel", "benchmark_tensor_parallel.py", []))
    if options.decode_cases:
        scripts.append(("decode cases", "benchmark_decode.py", ["--skip-table", "--cases", options.decode_cases]))
    if options.prefill_cases:
        cases = ["--skip-table", "--cases", options.prefill_cases]
        scripts.append(("select cases", "benchmark_select.py", cases))
        scripts.append(("prefill cases", "benchmark_prefill.py", cases))

    def part(name, script, extra):
        launcher = []
        if script == "benchmark_tensor_parallel.py":
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [sys.executable, *launcher, str(HERE / script), "--variant", options.variant, *extra]

        def run(results):
            with log.open("a") as out:
                print(f"\n== {name}: {script} {' '.join(extra)}", file=out, flush=True)
                done = subprocess.run([*command, "--results", str(results)], stdout=out, stderr=subprocess.STDOUT)
            if done.returncode:
                raise RuntimeError(f"{script} ended with status {done.returncode}, see {log}")

        return Part(name, run)

    return [part(*script) for script in scripts]


# ---- parts of --smoke


def workloads():
    """(name, class, workload) of every class that `kernels benchmark` finds."""
    found = []
    for script in sorted(HERE.glob("benchmark*.py")):
        module = importlib.import_module(script.stem)
        for cls in vars(module).values():
            if isinstance(cls, type) and cls.__module__ == script.stem and hasattr(cls, "work"):
                names = [name.removeprefix("benchmark_") for name in vars(cls) if name.startswith("benchmark_")]
                if cls.key["op"] == "layer" and not has_transformers():
                    continue
                found += [(f"{cls.key['op']} {cls.__name__}.{name}", cls, name) for name in names]
    return found


class Machine:
    """Where a smoke run happens: device, its name in the rows, and rough limits."""

    def __init__(self):
        self.cuda = torch.cuda.is_available()
        self.device = "cuda" if self.cuda else "cpu"
        self.name = torch.cuda.get_device_name() if self.cuda else f"CPU, {torch.get_num_threads()} threads"
        x = torch.ones(1 << (28 if self.cuda else 23), device=self.device)
        y = x.clone()
        self.bandwidth = 2 * 4 * x.numel() / self.seconds(lambda: y.copy_(x), 0.05) / 1e9  # GB/s
        n, dtype = (8192, torch.bfloat16) if self.cuda else (512, torch.float32)
        a = torch.ones(n, n, device=self.device, dtype=dtype)
        a @ a
        self.synchronize()
        self.rate = 2 * n**3 / self.seconds(lambda: a @ a, 0.05) / 1e12  # TFLOP/s

    def synchronize(self):
        if self.cuda:
            torch.cuda.synchronize()

    def seconds(self, call, least=SMOKE_SECONDS):
        """Median of repeated calls, after a first one elsewhere."""
        times, started = [], time.perf_counter()
        while not times or (time.perf_counter() - started < least and len(times) < 1000):
            start = time.perf_counter()
            call()
            self.synchronize()
            times.append(time.perf_counter() - start)
        return statistics.median(times)


def smoke_parts(kernel):
    machine = []  # made by the first part, since it measures

    def part(name, cls, workload):
        def run(results):
            if not machine:
                machine.append(Machine())
            protocol.merge_rows(results, [smoke_row(kernel, cls, workload, machine[0])])

        return Part(name, run)

    return [part(*found) for found in workloads()]


def smoke_row(kernel, cls, workload, machine):
    """Compares a workload's answer and times it: with the compiled kernels where they take it, else with plain torch."""
    torch.manual_seed(cls.seed)
    bench = cls()
    bench.kernel, bench.device = kernel, machine.device
    getattr(bench, f"setup_{workload}", bench.setup)()
    call = getattr(bench, f"benchmark_{workload}")
    backends = ("aot", "torch") if machine.cuda else ("torch",)
    for backend in backends:
        with kernel.backend(backend), contextlib.suppress(NotImplementedError):
            call()
            machine.synchronize()
            want = getattr(bench, f"verify_{workload}")()
            if not torch.allclose(bench.out.float(), want.float(), atol=1e-2):
                raise AssertionError("the answer differs from plain torch's")
            cold = machine.seconds(call)
            break
    else:
        raise RuntimeError(f"no backend of {backends} takes it")
    size, flops = bench.work()
    key = {"dtype": workload, **cls.key, "impl": "ours", "device": machine.name, "backend": backend}
    row = protocol.row(machine.bandwidth, cold * 1e6, cold * 1e6, size, flops, **key)
    row["limit_ms"] = round(max(row["limit_ms"], flops / machine.rate / 1e9), 7)
    return {**row, "u4": None} if row["op"] == "prefill" else row


# ---- the sweep


def beside(results):
    """Where the rows of a run that isn't over are, and its state."""
    return [results.with_name(f"{results.name}.{what}") for what in ("running", "state")]


def sweep(parts, results, identity):
    """Runs the parts that the state beside `results` doesn't have. Returns the rows of all and {name of a part that failed:
    why}."""
    running, state_path = beside(results)
    state = {"identity": identity, "done": []}
    if state_path.exists():
        found = json.loads(state_path.read_text())
        if found["identity"] != identity:
            raise SystemExit(
                f"{state_path} is of another run ({found['identity']}, now {identity}): --restart drops it"
            )
        state = found
        print(f"going on after {len(state['done'])} of {len(parts)} parts", flush=True)
    else:
        running.unlink(missing_ok=True)
    failed = {}
    left = [part for part in parts if part.name not in state["done"]]
    bar = tqdm(total=len(parts), initial=len(parts) - len(left), unit="part") if tqdm else None
    for part in left:
        bar.set_description(part.name) if bar is not None else print(part.name, flush=True)
        try:
            part.run(running)
        except Exception as error:  # noqa: BLE001 - said at the end, with the status
            failed[part.name] = f"{type(error).__name__}: {error}"
        else:
            state["done"].append(part.name)
            write(state_path, json.dumps(state))
        if bar is not None:
            bar.update()
    if bar is not None:
        bar.close()
    rows = json.loads(running.read_text()) if running.exists() else []
    protocol.merge_rows(results, rows)
    if not failed:
        state_path.unlink(missing_ok=True)
        running.unlink(missing_ok=True)
    return rows, failed


def write(path, text):
    """All of it or nothing."""
    whole = path.with_name(path.name + ".part")
    whole.write_text(text)
    whole.replace(path)


# ---- what came out


def key_of(row):
    return tuple(row.get(name) for name in protocol.KEY)


def place(row):
    """A row's key in words."""
    lengths = "weighted cases" if row["kv_len"] is None and row["batch"] is None else f"B={row['batch']}"
    lengths += f" q={row['q_len']}" if row["q_len"] else ""
    lengths += f" kv={row['kv_len']}" if row["kv_len"] else ""
    return " ".join(
        str(x) for x in (row["op"], row["impl"], row["dtype"], row["heads"], lengths, row["selection"] or "")
    )


def show(rows):
    print("\nms cold | ms warm | limit ms | % of limit | what")
    for row in rows:
        share = 100 * row["limit_ms"] / row["ms_cold"]
        figures = f"{row['ms_cold']:9.5f} | {row['ms_warm']:9.5f} | {row['limit_ms']:9.5f} | {share:5.1f}"
        print(f"{figures} | {place(row).strip()} [{row['backend'] or 'peer'}, {row['device']}]")


def regressions(rows, stored, threshold):
    """(row, the stored one) of ours that became slower, and how many rows had one to compare with."""
    before = {key_of(row): row for row in stored}
    pairs = [(row, before[key_of(row)]) for row in rows if row["backend"] and key_of(row) in before]

    def slower(row, old):
        difference = row["ms_cold"] - old["ms_cold"]
        return difference > old["ms_cold"] * threshold / 100 and difference * 1000 > LEAST_US

    return [pair for pair in pairs if slower(*pair)], len(pairs)


def parser():
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--variant", help="a built variant's folder (default with --smoke: build/torch-cpu)")
    made.add_argument("--results", type=Path, help="file of rows (default: build/benchmarks/rows.json or smoke.json)")
    made.add_argument("--against", type=Path, help="a stored run's rows, such as benchmarks/results/h200.json")
    made.add_argument("--threshold", type=float, default=THRESHOLD, help="percent (default: %(default)s)")
    made.add_argument("--smoke", action="store_true", help="every benchmark once, small, on whatever device there is")
    made.add_argument("--only", nargs="+", metavar="PART", help="parts whose names start with one of these")
    made.add_argument("--list", action="store_true", help="print the names of the parts")
    made.add_argument("--restart", action="store_true", help="forget an interrupted run's state")
    made.add_argument("--decode-cases", help="a file of weighted decode steps")
    made.add_argument("--prefill-cases", help="a file of weighted prefills")
    return made


def prepared(options):
    """Checks the options and fills in defaults."""
    build = HERE.parent / "build"
    if not options.smoke and not (options.list or torch.cuda.is_available()):
        raise SystemExit("the figures need a CUDA device, which torch doesn't find; --smoke runs without one")
    if options.variant is None:
        if not options.smoke and not options.list:
            raise SystemExit("--variant: which built variant (python tools/build.py cuda prints it)")
        options.variant = str(build / "torch-cpu")
    if options.results is None:
        options.results = build / "benchmarks" / ("smoke.json" if options.smoke else "rows.json")
    options.results = options.results.resolve()
    options.results.parent.mkdir(parents=True, exist_ok=True)
    return options


def parts_of(options):
    if not options.smoke:
        parts = gpu_parts(options, options.results.with_suffix(".log"))
    elif options.list:
        parts = [Part(name, None) for name, *_ in workloads()]
    else:
        parts = smoke_parts(protocol.load(options.variant))
    if options.only:
        parts = [part for part in parts if part.name.startswith(tuple(options.only))]
        if not parts:
            raise SystemExit(f"no part starts with {options.only}; --list prints them")
    return parts


def judge(rows, options, stored):
    """Prints what became slower; whether anything did."""
    found, compared = regressions(rows, stored, options.threshold)
    print(
        f"\n{compared} rows compared with {options.against.name}; {len(found)} slower by more than {options.threshold:g} %"
    )
    for row, before in found:
        times = f"{row['ms_cold']:.5f} ms, was {before['ms_cold']:.5f} ({row['ms_cold'] / before['ms_cold']:.2f}x)"
        print(f"REGRESSION {place(row).strip()}: {times}")
    return bool(found)


def main(arguments=None):
    options = prepared(parser().parse_args(arguments))
    parts = parts_of(options)
    if options.list:
        print("\n".join(part.name for part in parts))
        return 0
    if options.restart:
        for path in beside(options.results):
            path.unlink(missing_ok=True)
    metadata = (Path(options.variant) / "metadata.json").read_bytes()
    identity = f"{'smoke' if options.smoke else 'full'}, variant {hashlib.sha256(metadata).hexdigest()[:12]}"
    stored = json.loads(options.against.read_text()) if options.against else None  # before the run may write there
    rows, failed = sweep(parts, options.results, identity)
    show(rows)
    for name, why in failed.items():
        print(f"FAILED {name}: {why}")
    slower = stored is not None and judge(rows, options, stored)
    return 2 if failed else int(slower)


if __name__ == "__main__":
    sys.exit(main())
