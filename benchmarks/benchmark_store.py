"""store_kv on one GPU: time a call and its share of the copy bandwidth.

    python benchmarks/benchmark_store.py --variant build/torch-stable-abi211-cu130-x86_64-linux [--results FILE]

K, V and index K of T tokens into caches of 128-token pages at random slots. "fp8": bf16 rows into e4m3 caches without a
scale; "fp8 scaled": with one scale per head. Bytes: every row read once and written once, and the slots. Protocol:
protocol.py; a cold graph of one-token calls would need 26,000 of them and holds 512. Every shape's answer is checked
first.
"""

import argparse
import sys
from pathlib import Path
from typing import ClassVar

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

import protocol

TOKENS = (1, 16, 64, 256, 1024, 8192)
HEADS = (4, 1)
PAGE = 128


def make_sets(tokens, heads, fp8, scaled):
    size = tokens * (2 * heads + 1) * 128 * (3 if fp8 else 4)
    count = protocol.sets_for(size)
    pages = -(-tokens * count // PAGE) + 1
    kept = torch.float8_e4m3fn if fp8 else torch.bfloat16
    caches = [torch.zeros(pages, heads, PAGE, 128, device="cuda").to(kept) for _ in range(2)]
    caches.append(torch.zeros(pages, PAGE, 128, device="cuda").to(kept))
    slots = torch.randperm(pages * PAGE, device="cuda")[: tokens * count].view(count, tokens)
    rows = [torch.randn(count, tokens, *heads_, 128, device="cuda").bfloat16() for heads_ in ((heads,), (heads,), ())]
    scales = [torch.rand(heads, device="cuda") + 0.5 if scaled else None for _ in range(2)]
    return [(rows[0][i], rows[1][i], rows[2][i], *caches, slots[i], *scales) for i in range(count)], size + 8 * tokens


def check(call, inputs, backend):
    """The bytes that the torch backend writes, in the slots of one call."""
    k_cache, v_cache, index_cache, slots = inputs[3:7]
    places = slots // PAGE, slots % PAGE
    read = lambda: (
        [c.view(torch.uint8)[places[0], :, places[1]] for c in (k_cache, v_cache)]
        + [index_cache.view(torch.uint8)[places]]
    )
    with backend("torch"):
        call(*inputs)
    want = [x.clone() for x in read()]
    for cache in (k_cache, v_cache, index_cache):
        cache.view(torch.uint8).fill_(0x55)
    with backend("aot"):
        call(*inputs)
    if not all(torch.equal(x, y) for x, y in zip(read(), want)):
        raise SystemExit("store_kv: the kernel and the torch backend differ")


class StoreKv(protocol.Benchmark):
    """K, V and index key of 256 tokens and 4 heads to slots all over 32 pages; the K cache's bytes are compared."""

    seed = 0
    tokens, pages, heads = 256, 32, 4
    key: ClassVar[dict] = {"op": "store", "heads": str(heads), "batch": tokens, "q_len": 1, "page": PAGE}

    def work(self):
        return self.tokens * ((2 * self.heads + 1) * 128 * (2 + self.caches[0].element_size()) + 8), 0

    def make(self, dtype) -> None:
        shapes = [(self.heads, 128), (self.heads, 128), (128,)]
        self.rows = [torch.randn(self.tokens, *shape, device=self.device).bfloat16() for shape in shapes]
        self.slots = torch.randperm(self.pages * PAGE, device=self.device)[: self.tokens]
        shapes = [(self.heads, PAGE, 128), (self.heads, PAGE, 128), (PAGE, 128)]
        self.caches = [torch.zeros(self.pages, *shape, device=self.device).to(dtype) for shape in shapes]
        self.out = self.caches[0].view(torch.uint8)

    def setup_bf16(self) -> None:
        self.make(torch.bfloat16)

    def setup_fp8(self) -> None:
        self.make(torch.float8_e4m3fn)

    def benchmark_bf16(self) -> None:
        self.kernel.store_kv(*self.rows, *self.caches, self.slots)

    benchmark_fp8 = benchmark_bf16

    def verify_bf16(self) -> torch.Tensor:
        want = torch.zeros(self.caches[0].shape, device=self.device)
        want[self.slots // PAGE, :, self.slots % PAGE] = self.rows[0].float()
        return want.to(self.caches[0].dtype).view(torch.uint8)

    verify_fp8 = verify_bf16


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variant", required=True)
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    m3_sparse = protocol.load(options.variant)
    torch.manual_seed(0)
    bandwidth = protocol.copy_bandwidth()

    def call(k, v, index_k, k_cache, v_cache, index_cache, slots, k_scale, v_scale):
        m3_sparse.store_kv(k, v, index_k, k_cache, v_cache, index_cache, slots, k_scale=k_scale, v_scale=v_scale)

    rows = []
    for heads in HEADS:
        for dtype in ("bf16", "fp8", "fp8 scaled"):
            for tokens in TOKENS:
                sets, size = make_sets(tokens, heads, dtype != "bf16", dtype == "fp8 scaled")
                check(call, sets[0], m3_sparse.backend)
                with m3_sparse.backend("aot"):
                    cold, warm = protocol.cold_and_warm(call, sets)
                key = {"op": "store", "impl": "ours", "dtype": dtype, "heads": str(heads), "batch": tokens, "q_len": 1}
                rows.append(protocol.row(bandwidth, cold, warm, size, 0, **key, page=PAGE))
    if options.results:
        protocol.merge_rows(options.results, rows)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {bandwidth:.0f} GB/s")
    protocol.print_table(rows, ("dtype", "heads", "batch"), bandwidth)


if __name__ == "__main__":
    main()
