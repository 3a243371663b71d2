"""merge_states on one GPU: time a call, share of the copy bandwidth, host cost; torch.compile of the formula as peer.

    python benchmarks/benchmark_combine.py --variant build/torch-stable-abi211-cu130-x86_64-linux [--results FILE]

Protocol: each case is a CUDA graph of calls over input sets that together exceed twice the L2 ("cold"); the figure is
the median over replays of (graph time / calls). Bytes are those of the algorithm: every state and LSE read once, the
result written once. The copy bandwidth (read + written) is measured in the same run. Host cost: wall time of 2,000
calls that are only enqueued. In the rows heads is "heads x states", batch the tokens.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import ClassVar

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

import protocol

# states, tokens, heads: split decode at batch 1, 16 and 256; two ranks of a context-parallel prefill; 16 partials.
CASES = [(8, 1, 64), (16, 1, 64), (4, 16, 64), (2, 256, 64), (8, 256, 64), (2, 8192, 64), (16, 2048, 64)]
DTYPES = [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)]
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def formula(outs, lses, out_dtype):
    lse = torch.logsumexp(lses, 0)
    weights = torch.exp(lses - lse)
    return (weights[..., None] * outs.float()).sum(0).to(out_dtype), lse


class MergeStates(protocol.Benchmark):
    """Eight partial results of 256 tokens and 64 heads."""

    seed = 0
    key: ClassVar[dict] = {"op": "merge", "dtype": "fp32>fp32", "heads": "64x8", "batch": 256, "q_len": 1}

    def setup(self) -> None:
        self.outs = torch.randn(8, 256, 64, 128, device=self.device)
        self.lses = torch.randn(8, 256, 64, device=self.device)

    def work(self):
        return 256 * 64 * (8 * 516 + 516), 2 * 8 * 256 * 64 * 128

    def benchmark_merge(self) -> None:
        self.out, _ = self.kernel.merge_states(self.outs, self.lses)

    def verify_merge(self) -> torch.Tensor:
        return formula(self.outs, self.lses, torch.float32)[0]


def host_cost(call, inputs, calls=2000):
    for _ in range(50):
        call(*inputs)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call(*inputs)
    microseconds = (time.perf_counter() - start) * 1e6 / calls
    torch.cuda.synchronize()
    return microseconds


def measure(m3_sparse, bandwidth, n, t, h, dtype, out_dtype):
    """Rows of one case: ours and torch.compile of the formula."""
    size = n * t * h * (128 * dtype.itemsize + 4) + t * h * (128 * out_dtype.itemsize + 4)
    count = min(64, protocol.sets_for(size))
    inputs = [
        (torch.randn(n, t, h, 128, device="cuda").to(dtype), torch.randn(n, t, h, device="cuda")) for _ in range(count)
    ]
    torch._dynamo.reset()  # one specialised peer a case
    compiled = torch.compile(formula, dynamic=False)
    calls = {
        "ours": lambda o, l: m3_sparse.merge_states(o, l, out_dtype=out_dtype),
        "torch.compile": lambda o, l: compiled(o, l, out_dtype),
    }
    want = formula(*(x.double() for x in inputs[0]), torch.float64)
    key: ClassVar[dict] = {"dtype": f"{NAMES[dtype]}>{NAMES[out_dtype]}", "heads": f"{h}x{n}", "batch": t, "q_len": 1}
    rows = []
    for impl, call in calls.items():
        error = float((call(*inputs[0])[0].double() - want[0]).norm() / want[0].norm())
        if not error < 5e-3:
            raise SystemExit(f"merge_states, {impl}: relative error {error:.1e}")
        times = protocol.cold_and_warm(call, inputs)
        rows.append(protocol.row(bandwidth, *times, size, 2 * n * t * h * 128, op="merge", impl=impl, **key))
    return rows


def host_costs(m3_sparse):
    """Microseconds of one small call and of its parts, only enqueued."""
    from m3_sparse import capability, checks, ops

    outs, lses = torch.randn(8, 1, 64, 128, device="cuda"), torch.randn(8, 1, 64, device="cuda")
    out, lse = torch.empty(1, 64, 128, device="cuda"), torch.empty(1, 64, device="cuda")
    operator = getattr(ops, "ops", ops).aot_merge_states.default
    chosen_by = ("merge_states", outs.device, outs.dtype, outs.dtype)
    return {
        "argument checks alone": host_cost(checks.merge_states, (outs, lses)),
        "choice of backend alone": host_cost(capability.choose, chosen_by),
        "public function": host_cost(m3_sparse.merge_states, (outs, lses)),
        "operator, outputs given": host_cost(operator, (out, lse, outs, lses)),
        "torch.add_ for scale": host_cost(out.add_, (1.0,)),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variant", required=True)
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    m3_sparse = protocol.load(options.variant)
    torch.manual_seed(0)
    bandwidth = protocol.copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {bandwidth:.0f} GB/s")
    for name, value in host_costs(m3_sparse).items():
        print(f"host cost a call, {name}: {value:.2f} us", flush=True)
    rows = [row for dtypes in DTYPES for case in CASES for row in measure(m3_sparse, bandwidth, *case, *dtypes)]
    if options.results:
        protocol.merge_rows(options.results, rows)
    protocol.print_table(rows, ("impl", "dtype", "heads", "batch"), bandwidth)


if __name__ == "__main__":
    main()
