"""merge_states on one GPU: time a call, share of the copy bandwidth, host cost; torch.compile of the formula as peer.

    python benchmarks/benchmark_combine.py --variant build/torch-stable-abi211-cu130-x86_64-linux [--json FILE]

Protocol: each case is a CUDA graph of calls over input sets that together exceed twice the L2 ("cold"); the figure is
the median over replays of (graph time / calls). Bytes are those of the algorithm: every state and LSE read once, the
result written once. The copy bandwidth (read + written) is measured in the same run. Host cost: wall time of 2,000
calls that are only enqueued.
"""

import argparse
import json
import time
from pathlib import Path

import protocol
import torch

# states, tokens, heads: split decode at batch 1, 16 and 256; two ranks of a context-parallel prefill; 16 partials.
CASES = [(8, 1, 64), (16, 1, 64), (4, 16, 64), (2, 256, 64), (8, 256, 64), (2, 8192, 64), (16, 2048, 64)]
DTYPES = [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)]
L2_BYTES = 60 << 20


def formula(outs, lses, out_dtype):
    lse = torch.logsumexp(lses, 0)
    weights = torch.exp(lses - lse)
    return (weights[..., None] * outs.float()).sum(0).to(out_dtype), lse


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


def measure(m3_sparse, bandwidth):
    rows = []
    for dtype, out_dtype in DTYPES:
        for n, t, h in CASES:
            size = n * t * h * (128 * dtype.itemsize + 4) + t * h * (128 * out_dtype.itemsize + 4)
            sets = min(64, max(2, -(-2 * L2_BYTES // size) + 1))
            inputs = [
                (torch.randn(n, t, h, 128, device="cuda").to(dtype), torch.randn(n, t, h, device="cuda"))
                for _ in range(sets)
            ]
            torch._dynamo.reset()  # one specialised peer a case
            peer = torch.compile(formula, dynamic=False)
            ours = protocol.graph_time(lambda o, l: m3_sparse.merge_states(o, l, out_dtype=out_dtype), inputs)
            warm = protocol.graph_time(lambda o, l: m3_sparse.merge_states(o, l, out_dtype=out_dtype), inputs[:1] * 20)
            theirs = protocol.graph_time(lambda o, l: peer(o, l, out_dtype), inputs)
            rows.append(
                {
                    "states": str(dtype)[6:],
                    "out": str(out_dtype)[6:],
                    "N": n,
                    "T": t,
                    "H": h,
                    "bytes": size,
                    "us": round(ours, 2),
                    "us_warm": round(warm, 2),
                    "gb_per_s": round(size / ours / 1000, 1),
                    "percent_of_copy": round(100 * size / ours / 1000 / bandwidth, 1),
                    "torch_compile_us": round(theirs, 2),
                }
            )
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variant", required=True)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    m3_sparse = protocol.load(options.variant)
    from m3_sparse import ops

    torch.manual_seed(0)
    bandwidth = protocol.copy_bandwidth()
    outs, lses = torch.randn(8, 1, 64, 128, device="cuda"), torch.randn(8, 1, 64, device="cuda")
    out, lse = torch.empty(1, 64, 128, device="cuda"), torch.empty(1, 64, device="cuda")
    operator = getattr(ops, "ops", ops).aot_merge_states.default
    from m3_sparse import capability, checks

    host = {
        "argument checks alone": host_cost(checks.merge_states, (outs, lses)),
        "choice of backend alone": host_cost(capability.choose, ("merge_states", outs.device, outs.dtype, outs.dtype)),
        "public function": host_cost(m3_sparse.merge_states, (outs, lses)),
        "operator, outputs given": host_cost(operator, (out, lse, outs, lses)),
        "torch.add_ for scale": host_cost(out.add_, (1.0,)),
    }
    rows = measure(m3_sparse, bandwidth)
    result = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "copy_gb_per_s": round(bandwidth, 1),
        "host_us": {name: round(value, 2) for name, value in host.items()},
        "rows": rows,
    }
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{result['card']}, torch {result['torch']}, copy {bandwidth:.0f} GB/s")
    for name, value in result["host_us"].items():
        print(f"host cost a call, {name}: {value} us")
    columns = list(rows[0])
    print(" | ".join(columns))
    for row in rows:
        print(" | ".join(str(row[column]) for column in columns))


if __name__ == "__main__":
    main()
