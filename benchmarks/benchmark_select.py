"""select_blocks (score + top-k) on one GPU: time a call and its share of the copy bandwidth.

    python benchmarks/benchmark_select.py --variant build/torch-stable-abi211-cu130-x86_64-linux [--results FILE]
        [--quick] [--only decode|prefill] [--peers NAME ...]

Decode and verify steps of uniform batches and prefills, pages of 128 tokens at random places of a pool that no two
requests share, top-k 16. "fp8": bf16 queries and e4m3 index keys; "fp8q": both e4m3. Bytes: every index key read once,
in prefills every query too. FLOPs: 2 x 128 per (token, head, key), in prefills (queries are the last q_len of kv_len
tokens) per visible key. Rows "select" time select_blocks, rows "score" block_scores alone. Protocol: protocol.py; the
limit of a prefill is the larger one of bytes over the copy bandwidth and FLOPs over cuBLAS's rate on 8192^3 in bf16 in
the same run, twice that rate for fp8q. Every shape's answer is checked first: scores of some rows against float32
torch, the selection exactly against the scores. Peers (peers.py) run on the inputs of decode steps, score and top-k
together; theirs is compared with ours.
"""

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

import definitions
import peers
import protocol

PAGE = 128
MOST_DECODE_ROWS = 16  # of a request; more is a prefill
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
PREFILL_CASES = [
    (1, 8192, 8192, 4),
    (1, 32768, 32768, 4),
    (2, 16384, 16384, 4),
    (1, 131072, 4096, 4),
    (1, 131072, 8192, 4),
    (1, 65536, 512, 4),
    (1, 33024, 1000, 4),
    (1, 32768, 64, 4),
    (1, 32768, 32, 4),
    (1, 32768, 32768, 1),
]
QUICK = [(1, 32768, 1, 4), (16, 32768, 1, 4), (64, 131072, 1, 4)]


def make_sets(batch, kv_len, q_len, heads, dtype):
    key_bytes = 2 if dtype == "bf16" else 1
    size = batch * kv_len * 128 * key_bytes
    if q_len > MOST_DECODE_ROWS:
        size += batch * q_len * heads * 128 * (1 if dtype == "fp8q" else 2)
    count = protocol.sets_for(size)
    width = kv_len // PAGE
    pages = count * batch * width
    keys = torch.empty(
        pages, PAGE, 128, dtype=torch.bfloat16 if dtype == "bf16" else torch.float8_e4m3fn, device="cuda"
    )
    for part in keys.view(torch.uint8).view(-1, PAGE * 128 * key_bytes).split(1 << 14):
        numbers = torch.randn(part.shape[0], PAGE * 128, device="cuda").to(keys.dtype)
        part.copy_(numbers.view(torch.uint8))
    tables = torch.randperm(pages, device="cuda").to(torch.int32).view(count, batch, width)
    query_dtype = torch.float8_e4m3fn if dtype == "fp8q" else torch.bfloat16
    queries = torch.empty(count, batch * q_len, heads, 128, dtype=query_dtype, device="cuda")
    for query in queries:
        query.copy_(torch.randn(batch * q_len, heads, 128, device="cuda"))
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
    blocks = reference.block_count(rows.end)
    for part in torch.arange(query.shape[0], device="cuda").split(4096):
        if not torch.equal(ids[part], reference.select_from_scores(scores[part], blocks[part], ids.shape[-1], 1, 0)):
            raise SystemExit("select_blocks: wrong selection")
    if not torch.equal(m3_sparse.select_blocks(*inputs, **lengths), ids):
        raise SystemExit("select_blocks: the selection depends on return_scores")
    for t in {0, query.shape[0] - 1}:
        k = keys[table[rows.request[t]].long()].float().view(-1, 128)[: rows.end[t]]
        dots = torch.nn.functional.pad(query[t].float() @ k.T, (0, -k.shape[0] % PAGE), value=-torch.inf)
        best = dots.view(query.shape[1], -1, PAGE).amax(-1)
        # fp8 products are added with fewer bits than fp32 has.
        tolerance = 5e-2 if query.dtype == torch.float8_e4m3fn else 2e-3
        if not torch.allclose(scores[t, :, : best.shape[1]], best, rtol=1e-5, atol=tolerance):
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


def matmul_rate():
    """TFLOP/s of cuBLAS, bf16, 8192^3."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    return 2 * 8192**3 / protocol.graph_time(lambda: torch.mm(a, a, out=out), [()] * 20) / 1e6


def measure_prefill(m3_sparse, bandwidth, dtypes, cases):
    rate = matmul_rate()
    rows = []
    for dtype in dtypes:
        for batch, kv_len, q_len, heads in cases:
            sets, lengths, size = make_sets(batch, kv_len, q_len, heads, dtype)
            flops = 256 * batch * heads * sum(range(kv_len - q_len + 1, kv_len + 1))
            key = {"dtype": dtype, "heads": str(heads), "batch": batch, "q_len": q_len, "kv_len": kv_len, "page": PAGE}
            with m3_sparse.backend("aot"):
                check(m3_sparse, sets[0], lengths)
                cold, warm = protocol.cold_and_warm(lambda q, k, t: m3_sparse.select_blocks(q, k, t, **lengths), sets)
            row = protocol.row(bandwidth, cold, warm, size, flops, op="select", impl="ours", **key)
            least = flops / rate / 1e9 / (2 if dtype == "fp8q" else 1)
            row["limit_ms"] = round(max(row["limit_ms"], least), 5)
            rows.append(row)
            del sets
            torch.cuda.empty_cache()
    print(f"cuBLAS bf16 8192^3: {rate:.0f} TFLOP/s")
    print("dtype | heads | batch | q_len | kv_len | ms cold | ms warm | TFLOP/s | % of limit")
    for r in rows:
        place = [r[name] for name in ("dtype", "heads", "batch", "q_len", "kv_len", "ms_cold", "ms_warm")]
        figures = [f"{r['flops'] / r['ms_cold'] / 1e9:.0f}", f"{100 * r['limit_ms'] / r['ms_cold']:.0f}"]
        print(" | ".join(map(str, [*place, *figures])))
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
    parser.add_argument("--only", choices=("decode", "prefill"))
    peers.add_option(parser)
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    m3_sparse = protocol.load(options.variant)
    torch.manual_seed(0)
    bandwidth = protocol.copy_bandwidth()
    rows = []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {bandwidth:.0f} GB/s")
    print(f"peers: {', '.join(peers.importable()) or 'none importable'}", flush=True)
    for dtype in () if options.only == "prefill" else ("bf16", "fp8"):
        for case in QUICK if options.quick else CASES:
            rows += measure(m3_sparse, dtype, *case, bandwidth, options.peers)
            torch.cuda.empty_cache()
    prefill = []
    if options.only != "decode":
        prefill = measure_prefill(
            m3_sparse, bandwidth, ("bf16", "fp8", "fp8q"), PREFILL_CASES[:: 3 if options.quick else 1]
        )
    if options.results:
        protocol.merge_rows(options.results, [r for r in rows if r["op"] == "select"] + prefill)
    protocol.print_table(rows, ("op", "impl", "dtype", "heads", "batch", "q_len", "kv_len"), bandwidth)


if __name__ == "__main__":
    main()
