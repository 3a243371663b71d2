"""A whole decode step of a sparse layer on one GPU, as one graph: store K, V and index key, pick 16 blocks, attend.

    python benchmarks/benchmark.py --variant build/torch-stable-abi211-cu130-x86_64-linux [--results FILE]

64/4 heads, 4 index heads, one new token a request, pages of 128 tokens at random places of one pool per cache. "fp8":
bf16 queries, keys and values, e4m3 caches for all three. Bytes: every index key, K and V of the selected blocks, once.
Before a case is timed its step is compared with the same three calls on the torch backend. Protocol: protocol.py.
"""

import argparse
import sys
from pathlib import Path
from typing import ClassVar

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

import definitions
import protocol

PAGE, DIM, HEADS, KV_HEADS, TOPK = 128, 128, 64, 4, 16
CASES = [(1, 32768), (1, 131072), (16, 32768), (64, 32768)]  # batch, kv_len


def fill(shape, dtype):
    cache = torch.empty(shape, dtype=dtype, device="cuda")
    for part in cache.view(torch.uint8).view(shape[0], -1).split(1 << 9):
        numbers = torch.randn(part.shape[0], part.shape[1] // dtype.itemsize, device="cuda").to(dtype)
        part.copy_(numbers.view(torch.uint8))
    return cache


class Case:
    def __init__(self, m3_sparse, dtype, batch, kv_len):
        self.api = m3_sparse
        cache = torch.float8_e4m3fn if dtype == "fp8" else torch.bfloat16
        width = kv_len // PAGE
        self.bytes = batch * (kv_len + 2 * KV_HEADS * TOPK * PAGE) * DIM * cache.itemsize
        count = min(48, protocol.sets_for(self.bytes))
        pages = count * batch * width
        self.k, self.v = (fill((pages, KV_HEADS, PAGE, DIM), cache) for _ in range(2))
        self.index_k = fill((pages, PAGE, DIM), cache)
        order = torch.randperm(pages, device="cuda")
        tables = order.to(torch.int32).view(count, batch, width)
        self.lengths = {
            "cu_seqlens_q": torch.arange(batch + 1, dtype=torch.int32, device="cuda"),
            "seqused_k": torch.full((batch,), kv_len, dtype=torch.int32, device="cuda"),
        }
        rows = lambda *shape: torch.randn(count, batch, *shape, device="cuda").bfloat16()
        new = rows(HEADS, DIM), rows(KV_HEADS, DIM), rows(KV_HEADS, DIM), rows(DIM), rows(KV_HEADS, DIM)
        slots = tables[:, :, -1].long() * PAGE + PAGE - 1
        self.sets = [(tables[i], slots[i], *(x[i] for x in new)) for i in range(count)]
        self.ids = torch.empty(batch, KV_HEADS, TOPK, dtype=torch.int32, device="cuda")
        self.out = torch.empty(batch, HEADS, DIM, dtype=torch.bfloat16, device="cuda")

    def step(self, table, slots, q, k, v, index_k, index_q):
        self.api.store_kv(k, v, index_k, self.k, self.v, self.index_k, slots)
        self.api.select_blocks(index_q, self.index_k, table, **self.lengths, topk=TOPK, out=self.ids)
        self.api.sparse_attention(q, self.k, self.v, self.ids, table, **self.lengths, out=self.out)

    def check(self):
        """Near ties in the scores may swap a block, hence rows with equal selections are compared."""
        self.step(*self.sets[0])
        ids, out = self.ids.clone(), self.out.clone()
        with self.api.backend("torch"):
            self.step(*self.sets[0])
        same = (ids == self.ids).all(-1)
        assert same.float().mean() > 0.9, "the selections differ"
        group = HEADS // KV_HEADS
        heads = same.repeat_interleave(group, 1)
        want = self.out[heads].double()
        error = float((out[heads].double() - want).norm() / want.norm())
        assert error < 5e-3, f"relative error {error:.1e}"


class DecodeStep(protocol.Benchmark):
    """One decode step of 16 requests at 4,096 tokens: store, select 16 blocks, attend with 64 query heads on 4."""

    seed = 0
    batch, length = 16, 4096
    key: ClassVar[dict] = {
        "op": "step",
        "dtype": "bf16",
        "heads": f"{HEADS}/{KV_HEADS}",
        "batch": batch,
        "q_len": 1,
        "kv_len": length,
    }
    key.update(page=PAGE)

    def setup(self) -> None:
        options = {"device": self.device, "dtype": torch.bfloat16}
        self.caches = definitions.paged(self.batch, self.length, KV_HEADS, torch.bfloat16, self.device)
        self.q = torch.randn(self.batch, HEADS, DIM, **options)
        self.index_q = torch.randn(self.batch, KV_HEADS, DIM, **options)
        self.new = [torch.randn(self.batch, *heads, DIM, **options) for heads in ((KV_HEADS,), (KV_HEADS,), ())]
        self.slots = self.caches[3][:, -1].long() * PAGE + PAGE - 1
        self.lengths = definitions.lengths(self.batch, self.length, self.device)

    def work(self):
        """Bytes and operations."""
        size = self.batch * (self.length + 2 * KV_HEADS * TOPK * PAGE) * DIM * 2
        return size, self.batch * DIM * (2 * KV_HEADS * self.length + 4 * HEADS * TOPK * PAGE)

    def benchmark_step(self) -> None:
        k, v, index_k, table = self.caches
        self.kernel.store_kv(*self.new, k, v, index_k, self.slots)
        ids = self.kernel.select_blocks(self.index_q, index_k, table, **self.lengths, topk=TOPK)
        self.out = self.kernel.sparse_attention(self.q, k, v, ids, table, **self.lengths)

    def verify_step(self) -> torch.Tensor:
        *caches, table = self.caches
        k, v, index_k = (cache.clone() for cache in caches)
        k[table[:, -1].long(), :, -1], v[table[:, -1].long(), :, -1] = self.new[:2]
        index_k[table[:, -1].long(), -1] = self.new[2]
        ids = definitions.selection(self.index_q, index_k, table, TOPK)
        return definitions.attention(self.q, k, v, table, ids)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variant", required=True)
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    m3_sparse = protocol.load(options.variant)
    torch.manual_seed(0)
    bandwidth = protocol.copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {bandwidth:.0f} GB/s")
    print("dtype | batch | kv_len | us cold | us warm | store | select | attend (warm, alone) | % of copy | limit us")
    rows = []
    for dtype in ("bf16", "fp8"):
        for batch, kv_len in CASES:
            case = Case(m3_sparse, dtype, batch, kv_len)
            case.check()
            cold, warm = protocol.cold_and_warm(case.step, case.sets)
            table, slots, q, k, v, index_k, index_q = case.sets[0]
            parts = [
                protocol.graph_time(call, [()] * 40)
                for call in (
                    lambda: m3_sparse.store_kv(k, v, index_k, case.k, case.v, case.index_k, slots),
                    lambda: m3_sparse.select_blocks(index_q, case.index_k, table, **case.lengths, out=case.ids),
                    lambda: m3_sparse.sparse_attention(
                        q, case.k, case.v, case.ids, table, **case.lengths, out=case.out
                    ),
                )
            ]
            limit = case.bytes / bandwidth / 1000
            share = 100 * limit / cold
            print(
                f"{dtype} | {batch} | {kv_len} | {cold:.2f} | {warm:.2f} | "
                + " | ".join(f"{x:.2f}" for x in parts)
                + f" | {share:.0f} | {limit:.2f}",
                flush=True,
            )
            key = {"op": "step", "impl": "ours", "dtype": dtype, "heads": f"{HEADS}/{KV_HEADS}", "batch": batch}
            key.update(q_len=1, kv_len=kv_len, page=PAGE)
            flops = batch * DIM * (2 * KV_HEADS * kv_len + 4 * HEADS * TOPK * PAGE)
            rows.append(protocol.row(bandwidth, cold, warm, case.bytes, flops, **key))
            case = None
            torch.cuda.empty_cache()
    if options.results:
        protocol.merge_rows(options.results, rows)


if __name__ == "__main__":
    main()
