"""dense_attention on one GPU: time a call, its FLOP/s and its share of the copy bandwidth.

    python benchmarks/benchmark_dense.py --variant build/torch-stable-abi211-cu130-x86_64-linux [--results FILE]
    [--peers [NAME ...]] [--quick]

Uniform batches, bf16, pages of 128 tokens at random places of a pool that no two requests share. Prefill rows are causal
unless they say "full". FLOPs: 4 x 128 per (token, query head, visible key). Bytes: q, out, every K and V byte once.
Protocol: protocol.py; the limit is the larger one of bytes over the copy bandwidth and FLOPs over cuBLAS's rate on 8192^3
in the same run. Every shape's answer is checked first on some rows against float64.
Peers (peers.py; all that there are, those named, none with a bare --peers): flash-attn-4's own kernel over the same paged
caches, its graph replayed in turns with ours, its answer compared with ours; torch's scaled_dot_product_attention (its
cuDNN and its flash backend) on the same numbers in contiguous, unpaged caches, where it has the shape: square causal
prefill, and decode with every token visible.
"""

import argparse
import sys
from pathlib import Path
from typing import ClassVar

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parent))

import definitions
import peers
import protocol

PAGE = 128
# heads, batch, q_len, kv_len, causal
CASES = [
    ((64, 4), 1, 8192, 8192, True),
    ((64, 4), 1, 32768, 32768, True),
    ((64, 4), 1, 4096, 131072, True),
    ((64, 4), 1, 512, 65536, True),
    ((64, 4), 1, 128, 65536, True),
    ((64, 4), 1, 8192, 8192, False),
    ((16, 16), 2, 8192, 8192, True),
    ((64, 4), 1, 1, 32768, True),
    ((64, 4), 16, 1, 32768, True),
    ((64, 4), 64, 1, 32768, True),
    ((64, 4), 16, 4, 32768, True),
    ((64, 4), 1, 1, 1048576, True),
]
QUICK = [CASES[i] for i in (0, 1, 6, 7, 8, 9)]
TORCH = {"torch-cudnn": SDPBackend.CUDNN_ATTENTION, "torch-flash": SDPBackend.FLASH_ATTENTION}


def make_sets(heads, batch, q_len, kv_len):
    """Input sets (q, k_cache, v_cache, table), the lengths, and the bytes of one set."""
    size = 2 * 128 * (2 * batch * kv_len * heads[1] + 2 * batch * q_len * heads[0])
    count = min(8, protocol.sets_for(size))
    width = kv_len // PAGE
    pages = batch * width
    lengths = {
        "cu_seqlens_q": torch.arange(batch + 1, dtype=torch.int32, device="cuda") * q_len,
        "seqused_k": torch.full((batch,), kv_len, dtype=torch.int32, device="cuda"),
    }
    sets = []
    for _ in range(count):
        # In memory [page, token, head, 128], as engines keep it.
        caches = [torch.randn(pages, PAGE, heads[1], 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        table = torch.randperm(pages, device="cuda").to(torch.int32).view(batch, width)
        query = torch.randn(batch * q_len, heads[0], 128, device="cuda", dtype=torch.bfloat16)
        sets.append((query, *[cache.transpose(1, 2) for cache in caches], table))
    return sets, lengths, size


def check(call, inputs, batch, q_len, kv_len, causal):
    query, k_cache, v_cache, table = inputs
    out, lse = call(*inputs)
    group = query.shape[1] // k_cache.shape[1]
    for t in sorted({0, q_len // 2, batch * q_len - 1}):
        b, i = divmod(t, q_len)
        end = kv_len - q_len + i + 1 if causal else kv_len
        for h in {0, k_cache.shape[1] - 1}:
            keys, values = (x[table[b].long(), h].flatten(0, 1)[:end].double() for x in (k_cache, v_cache))
            part = slice(h * group, (h + 1) * group)
            logits = query[t, part].double() @ keys.T * 128**-0.5
            want = logits.softmax(-1) @ values
            error = (out[t, part].double() - want).norm() / want.norm()
            gap = (lse[t, part].double() - logits.logsumexp(-1)).abs().max()
            if not (error <= 5e-3 and gap <= 1e-3):
                raise SystemExit(f"dense_attention: row {t}, head {h}: relative error {error}, LSE {gap}")


def contiguous(inputs, batch):
    """[B, heads, tokens, 128] of the same numbers."""
    query, k_cache, v_cache, table = inputs
    keys, values = (x[table.long()].transpose(1, 2).flatten(2, 3) for x in (k_cache, v_cache))
    return query.unflatten(0, (batch, -1)).transpose(1, 2), keys, values


class DenseAttention(protocol.Benchmark):
    """One query each of 4 requests at 1,024 tokens; 64 query and 4 KV heads."""

    seed = 0
    batch, length, heads = 4, 1024, 4
    key: ClassVar[dict] = {
        "op": "dense",
        "heads": f"{16 * heads}/{heads}",
        "batch": batch,
        "q_len": 1,
        "kv_len": length,
        "page": PAGE,
    }
    key.update(selection="causal")

    def setup(self) -> None:
        self.k, self.v, _, self.table = definitions.paged(
            self.batch, self.length, self.heads, torch.bfloat16, self.device
        )
        self.q = torch.randn(self.batch, 16 * self.heads, 128, device=self.device).bfloat16()
        self.lengths = definitions.lengths(self.batch, self.length, self.device)

    def work(self):
        return 4 * (self.k.numel() + self.q.numel()), 4 * 128 * 16 * self.heads * self.batch * self.length

    def benchmark_bf16(self) -> None:
        self.out = self.kernel.dense_attention(self.q, self.k, self.v, self.table, **self.lengths)

    def verify_bf16(self) -> torch.Tensor:
        every = torch.arange(self.table.shape[1], device=self.device)
        return definitions.attention(self.q, self.k, self.v, self.table, every.expand(self.batch, self.heads, -1))


def torch_call(name, causal):
    def call(q, k, v):
        with sdpa_kernel(TORCH[name]):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    return call


def paged_peers(ours, sets, lengths, causal, chosen):
    """{name: call of a set's number} of the peers over paged caches that serve the case, their answers compared with ours."""
    calls = {}

    def prepare(peer):
        prepared = [peer.prepare(*inputs, *lengths.values(), causal) for inputs in sets]
        got, want = prepared[0](), ours(*sets[0])
        torch.cuda.synchronize()
        peers.check_attention(peer.name, got[0], want[0])
        if not float((got[1] - want[1]).abs().max()) < 1e-2:
            raise AssertionError(f"{peer.name}: LSE off")
        return lambda i: prepared[i]()

    calls.update(peers.each(peers.dense(sets[0][0].dtype), chosen, prepare))
    return calls


def measure(m3_sparse, case, bandwidth, rate, chosen):
    """The rows of one case."""
    heads, batch, q_len, kv_len, causal = case
    sets, lengths, size = make_sets(heads, batch, q_len, kv_len)
    flops = 4 * 128 * heads[0] * batch * (q_len * kv_len - (q_len * (q_len - 1) // 2 if causal else 0))
    rounds = 10 if flops > 1e12 else protocol.REPLAYS
    key: ClassVar[dict] = {
        "dtype": "bf16",
        "heads": f"{heads[0]}/{heads[1]}",
        "batch": batch,
        "q_len": q_len,
        "kv_len": kv_len,
    }
    key.update(op="dense", selection="causal" if causal else "full", page=PAGE)
    rows = []

    def add(impl, cold, call, first):
        warm = cold if flops > 1e11 else protocol.graph_time(call, [first] * 20)
        row = protocol.row(bandwidth, cold, warm, size, flops, impl=impl, **key)
        rows.append({**row, "limit_ms": round(max(size / bandwidth / 1e6, flops / rate / 1e9), 7)})

    def ours(*inputs):
        return m3_sparse.dense_attention(*inputs, **lengths, causal=causal, return_lse=True)

    with m3_sparse.backend("aot"):
        check(ours, sets[0], batch, q_len, kv_len, causal)
        calls = {"ours": lambda i: ours(*sets[i]), **paged_peers(ours, sets, lengths, causal, chosen)}
        colds = protocol.in_turns(list(calls.values()), [(i,) for i in range(len(sets))], rounds)
        for (impl, call), cold in zip(calls.items(), colds):
            add(impl, cold, call, (0,))
    if q_len in (1, kv_len):
        sets = [contiguous(inputs, batch) for inputs in sets]

        def run(peer):
            call = torch_call(peer.name, causal and q_len > 1)
            add(peer.name, protocol.graph_time(call, sets, rounds), call, sets[0])

        peers.each([peers.Peer(name, None) for name in TORCH], chosen, run)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variant", required=True)
    parser.add_argument("--results", type=Path)
    peers.add_option(parser)
    parser.add_argument("--quick", action="store_true", help="the shapes of the targets")
    options = parser.parse_args()
    m3_sparse = protocol.load(options.variant)
    torch.manual_seed(0)
    bandwidth, rate = protocol.copy_bandwidth(), protocol.matmul_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {bandwidth:.0f} GB/s, {rate:.0f} TFLOP/s")
    print(f"peers: {', '.join([*peers.importable(), *TORCH])}", flush=True)
    rows = []
    for case in QUICK if options.quick else CASES:
        found = measure(m3_sparse, case, bandwidth, rate, options.peers)
        protocol.merge_rows(options.results, found)
        print(case, ", ".join(f"{r['impl']} {r['ms_cold']:.4f}" for r in found), "ms", flush=True)
        rows += found
        torch.cuda.empty_cache()
    print("impl | heads | batch | q_len | kv_len | mask | us | TFLOP/s | GB/s | % of limit | of flash-attn-4's time")
    for r in rows:
        shape = [str(r[name]) for name in ("impl", "heads", "batch", "q_len", "kv_len", "selection")]
        rates = [r["flops"] / r["ms_cold"] / 1e9, r["bytes"] / r["ms_cold"] / 1e6, 100 * r["limit_ms"] / r["ms_cold"]]
        same = [
            x for x in rows if x["impl"] == "flash-attn-4" and all(x[n] == r[n] for n in protocol.KEY if n != "impl")
        ]
        ratio = f"{r['ms_cold'] / same[0]['ms_cold']:.3f}" if same else "-"
        print(" | ".join([*shape, f"{r['ms_cold'] * 1000:.1f}", *(f"{x:.0f}" for x in rates), ratio]))


if __name__ == "__main__":
    main()
