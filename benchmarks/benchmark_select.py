"""select_blocks (score + top-k) on one GPU: time a call and its share of the copy bandwidth.

    python benchmarks/benchmark_select.py --variant build/torch-stable-abi211-cu130-x86_64-linux [--results FILE]
        [--quick] [--peers NAME ...]

Decode and verify steps of uniform batches, pages of 128 tokens at random places of a pool that no two requests share,
top-k 16. "fp8": bf16 queries and e4m3 index keys. Bytes: every index key read once. FLOPs: 2 x 128 per (token, head,
key). Rows "select" time select_blocks, rows "score" block_scores alone. Protocol: protocol.py. Every shape's answer is
checked first: scores of some rows against float32 torch, the selection exactly against the scores. Peers (peers.py) run
on the same inputs, score and top-k together; theirs is compared with ours.
"""

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

import definitions  # noqa: E402
import peers  # noqa: E402
import protocol  # noqa: E402

PAGE = 128
# batch, kv_len, q_len, heads
CASES = [
    (1, 8192, 1, 4),
    (1, 32768, 1, 4),
    (1, 131072, 1, 4),
    (16, 8192, 1, 4),
    (16, 32768, 1, 4),
    (16, 131072, 1, 4),
    (64, 8192, 1, 4),
    (64, 32768, 1, 4),
    (64, 131072, 1, 4),
    (256, 8192, 1, 4),
    (256, 32768, 1, 4),
    (1, 32768, 1, 1),
    (64, 32768, 1, 1),
    (16, 32768, 2, 4),
    (16, 32768, 4, 4),
    (16, 32768, 8, 4),
    (16, 32768, 16, 4),
    (1, 1048576, 1, 4),
]
QUICK = [(1, 32768, 1, 4), (16, 32768, 1, 4), (64, 131072, 1, 4)]


def make_sets(batch, kv_len, q_len, heads, dtype):
    key_bytes = 1 if dtype == "fp8" else 2
    size = batch * kv_len * 128 * key_bytes
    count = protocol.sets_for(size)
    width = kv_len // PAGE
    pages = count * batch * width
    keys = torch.empty(pages, PAGE, 128, dtype=torch.float8_e4m3fn if dtype == "fp8" else torch.bfloat16, device="cuda")
    for part in keys.view(torch.uint8).view(-1, PAGE * 128 * key_bytes).split(1 << 14):
        numbers = torch.randn(part.shape[0], PAGE * 128, device="cuda").to(keys.dtype)
        part.copy_(numbers.view(torch.uint8))
    tables = torch.randperm(pages, device="cuda").to(torch.int32).view(count, batch, width)
    queries = torch.randn(count, batch * q_len, heads, 128, device="cuda").bfloat16()
    lengths = {
        "cu_seqlens_q": torch.arange(batch + 1, dtype=torch.int32, device="cuda") * q_len,
        "seqused_k": torch.full((batch,), kv_len, dtype=torch.int32, device="cuda"),
    }
    return [(queries[i], keys, tables[i]) for i in range(count)], lengths, size


def check(m3_sparse, inputs, lengths):
    from m3_sparse import reference

    ids, scores = m3_sparse.select_blocks(*inputs, **lengths, return_scores=True)
    query, keys, table = inputs
    rows = reference.locate_rows(lengths["cu_seqlens_q"], lengths["seqused_k"], query.shape[0], table.shape[1] * PAGE)
    want = reference.select_from_scores(scores, reference.block_count(rows.end), ids.shape[-1], 1, 0)
    if not torch.equal(ids, want):
        raise SystemExit("select_blocks: wrong selection")
    if not torch.equal(m3_sparse.select_blocks(*inputs, **lengths), ids):
        raise SystemExit("select_blocks: the selection depends on return_scores")
    for t in {0, query.shape[0] - 1}:
        k = keys[table[rows.request[t]].long()].float().view(-1, 128)[: rows.end[t]]
        dots = torch.nn.functional.pad(query[t].float() @ k.T, (0, -k.shape[0] % PAGE), value=-torch.inf)
        best = dots.view(query.shape[1], -1, PAGE).amax(-1)
        if not torch.allclose(scores[t, :, : best.shape[1]], best, rtol=1e-5, atol=2e-3):
            raise SystemExit("block_scores: wrong scores")


def measure_peer(m3_sparse, peer, sets, lengths):
    """(cold, warm) of one peer's score and top-k on our inputs, the first answer compared."""
    used = lengths["seqused_k"]
    q_len = sets[0][0].shape[0] // used.numel()
    prepared = [peer.prepare(*inputs, used, q_len) for inputs in sets]
    (call, query), (_, keys, table) = prepared[0], sets[0]
    got = call()
    ours = m3_sparse.block_scores if got.is_floating_point() else m3_sparse.select_blocks
    peers.check_selection(peer.name, got, ours(query, keys, table, **lengths))
    return protocol.cold_and_warm(lambda call: call(), [(call,) for call, _ in prepared])


def measure(m3_sparse, dtype, batch, kv_len, q_len, heads, bandwidth, chosen):
    """The rows of one case: select_blocks and block_scores, then the peers' score and top-k."""
    sets, lengths, size = make_sets(batch, kv_len, q_len, heads, dtype)
    key = {"dtype": dtype, "heads": str(heads), "batch": batch, "q_len": q_len, "kv_len": kv_len, "page": PAGE}
    row = lambda op, impl, times: protocol.row(
        bandwidth, *times, size, 256 * batch * q_len * heads * kv_len, op=op, impl=impl, **key
    )
    rows = []
    with m3_sparse.backend("aot"):
        check(m3_sparse, sets[0], lengths)
        for op, function in (("select", m3_sparse.select_blocks), ("score", m3_sparse.block_scores)):
            call = lambda q, k, t, function=function: function(q, k, t, **lengths)
            rows.append(row(op, "ours", protocol.cold_and_warm(call, sets)))
        found = peers.selection(sets[0][1].dtype)
        timed = peers.each(found, chosen, lambda peer: measure_peer(m3_sparse, peer, sets, lengths))
        rows += [row("select", name, times) for name, times in timed]
    return rows


class SelectBlocks(protocol.Benchmark):
    """16 of 64 blocks for 16 requests at 8,192 tokens and 4 index heads."""

    seed = 0
    batch, length, heads = 16, 8192, 4

    def make(self, dtype) -> None:
        *_, self.keys, self.table = definitions.paged(self.batch, self.length, self.heads, dtype, self.device)
        self.q = torch.randn(self.batch, self.heads, 128, device=self.device).bfloat16()
        self.lengths = definitions.lengths(self.batch, self.length, self.device)

    def setup_bf16(self) -> None:
        self.make(torch.bfloat16)

    def setup_fp8(self) -> None:
        self.make(torch.float8_e4m3fn)

    def benchmark_bf16(self) -> None:
        self.out = self.kernel.select_blocks(self.q, self.keys, self.table, **self.lengths)

    benchmark_fp8 = benchmark_bf16

    def verify_bf16(self) -> torch.Tensor:
        return definitions.selection(self.q, self.keys, self.table, 16)

    verify_fp8 = verify_bf16


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variant", required=True)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--quick", action="store_true", help="the three shapes of the targets")
    peers.add_option(parser)
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    m3_sparse = protocol.load(options.variant)
    torch.manual_seed(0)
    bandwidth = protocol.copy_bandwidth()
    rows = []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {bandwidth:.0f} GB/s")
    print(f"peers: {', '.join(peers.importable()) or 'none importable'}", flush=True)
    for dtype in ("bf16", "fp8"):
        for case in QUICK if options.quick else CASES:
            rows += measure(m3_sparse, dtype, *case, bandwidth, options.peers)
            torch.cuda.empty_cache()
    if options.results:
        protocol.merge_rows(options.results, [r for r in rows if r["op"] == "select"])
    protocol.print_table(rows, ("op", "impl", "dtype", "heads", "batch", "q_len", "kv_len"), bandwidth)


if __name__ == "__main__":
    main()
