"""select_blocks (score + top-k) on one GPU: time a call and its share of the copy bandwidth.

    python benchmarks/benchmark_select.py --variant build/torch-stable-abi211-cu130-x86_64-linux [--results FILE]
        [--quick] [--only decode|prefill] [--cases prefill_cases.json] [--peers NAME ...] [--seconds 400]

Decode and verify steps of uniform batches and prefills, pages of 128 tokens at random places of a pool that no two
requests share, top-k 16. "fp8": bf16 queries and e4m3 index keys; "fp8q": both e4m3. Bytes: every index key read once,
in prefills every query too. FLOPs: 2 x 128 per (token, head, key), in prefills (queries are the last q_len of kv_len
tokens) per visible key. Rows "select" time select_blocks, rows "score" block_scores alone. Protocol: protocol.py; the
limit of a prefill is the larger one of bytes over the copy bandwidth and FLOPs over cuBLAS's rate on 8192^3 in bf16 in
the same run (protocol.py), twice that rate for fp8q. Every shape's answer is checked first: scores of some rows against
float32 torch, the selection of up to 8,192 rows exactly against the scores. Peers (peers.py) run on the same inputs, score
and top-k together or, where their name ends in "score", the scores alone; theirs are compared with ours. Calls above 5 ms
take 9 replays.
--cases adds rows without batch and lengths: means by weight over the prefills of a file ({"cases": [{"query_lens",
"final_kv_lens", "weight"}]}), each timed cold with 5 replays. A peer that doesn't serve all of them gets no such row.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import ClassVar

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
    (64, 4096, 1, 4),
    (64, 8192, 1, 4),
    (64, 16384, 1, 4),
    (64, 32768, 1, 4),
    (64, 65536, 1, 4),
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
    # With those above: whole prompts and 4,096 new tokens over the length of the context.
    (1, 4096, 4096, 4),
    (1, 16384, 16384, 4),
    (1, 65536, 65536, 4),
    (1, 32768, 4096, 4),
    (1, 65536, 4096, 4),
]
QUICK = [(1, 32768, 1, 4), (16, 32768, 1, 4), (64, 131072, 1, 4)]
PREFILL_DTYPES = ("bf16", "fp8", "fp8q")
WEIGHTED_REPLAYS = 5
STARTED = time.time()


def make_sets(q_lens, kv_lens, heads, dtype, most=protocol.MOST_SETS):
    """Input sets (queries, keys, table) of one batch, its lengths, and the bytes of one set."""
    tokens, key_bytes = sum(q_lens), 2 if dtype == "bf16" else 1
    size = sum(kv_lens) * 128 * key_bytes
    if max(q_lens) > MOST_DECODE_ROWS:
        size += tokens * heads * 128 * (1 if dtype == "fp8q" else 2)
    count = min(most, protocol.sets_for(size))
    blocks = [-(-n // PAGE) for n in kv_lens]
    pages = count * sum(blocks)
    keys = torch.empty(
        pages, PAGE, 128, dtype=torch.bfloat16 if dtype == "bf16" else torch.float8_e4m3fn, device="cuda"
    )
    for part in keys.view(torch.uint8).view(-1, PAGE * 128 * key_bytes).split(1 << 14):
        numbers = torch.randn(part.shape[0], PAGE * 128, device="cuda").to(keys.dtype)
        part.copy_(numbers.view(torch.uint8))
    order = torch.randperm(pages, device="cuda").to(torch.int32)
    tables = torch.zeros(count, len(kv_lens), max(blocks), dtype=torch.int32, device="cuda")
    mine = torch.arange(max(blocks)) < torch.tensor(blocks)[:, None]
    tables[mine.expand_as(tables)] = order
    query_dtype = torch.float8_e4m3fn if dtype == "fp8q" else torch.bfloat16
    queries = torch.empty(count, tokens, heads, 128, dtype=query_dtype, device="cuda")
    for query in queries:
        query.copy_(torch.randn(tokens, heads, 128, device="cuda"))
    lengths = {
        "cu_seqlens_q": torch.tensor([0, *q_lens]).cumsum(0).to("cuda", torch.int32),
        "seqused_k": torch.tensor(kv_lens, dtype=torch.int32, device="cuda"),
    }
    return [(queries[i], keys, tables[i]) for i in range(count)], lengths, size


def check(m3_sparse, inputs, lengths):
    from m3_sparse import reference

    ids, scores = m3_sparse.select_blocks(*inputs, **lengths, return_scores=True)
    query, keys, table = inputs
    rows = reference.locate_rows(lengths["cu_seqlens_q"], lengths["seqused_k"], query.shape[0], table.shape[1] * PAGE)
    blocks = reference.block_count(rows.end)
    chunks = torch.arange(query.shape[0], device="cuda").split(4096)
    for part in {0: chunks[0], len(chunks) - 1: chunks[-1]}.values():
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


def measure_peer(m3_sparse, peer, sets, lengths, prefill=None, times=protocol.cold_and_warm):
    """(cold, warm) of one peer's score and top-k on our inputs, the first answer compared. `prefill`: the longest q_len."""
    used = lengths["seqused_k"]
    lens = [lengths["cu_seqlens_q"], used, prefill] if prefill else [used, sets[0][0].shape[0] // used.numel()]
    prepared = [peer.prepare(*inputs, *lens) for inputs in sets]
    (call, query), (_, keys, table) = prepared[0], sets[0]
    got = call()
    ours = m3_sparse.block_scores if got.is_floating_point() else m3_sparse.select_blocks
    peers.check_selection(peer.name, got, ours(query, keys, table, **lengths))
    return times(lambda call: call(), [(call,) for call, _ in prepared])


def measure(m3_sparse, dtype, batch, kv_len, q_len, heads, bandwidth, chosen):
    """The rows of one case: select_blocks and block_scores, then the peers' score and top-k."""
    sets, lengths, size = make_sets([q_len] * batch, [kv_len] * batch, heads, dtype)
    key: ClassVar[dict] = {
        "dtype": dtype,
        "heads": str(heads),
        "batch": batch,
        "q_len": q_len,
        "kv_len": kv_len,
        "page": PAGE,
    }
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


def visible(q_lens, kv_lens):
    """Pairs of a token and a key that it sees, per head."""
    return sum(q * kv - q * (q - 1) // 2 for q, kv in zip(q_lens, kv_lens))


def prefill_case(
    m3_sparse, dtype, q_lens, kv_lens, heads, chosen, times=protocol.cold_and_warm, most=protocol.MOST_SETS
):
    """{impl: (cold, warm)} of ours and the peers, bytes and FLOPs of one batch."""
    sets, lengths, size = make_sets(q_lens, kv_lens, heads, dtype, most)
    with m3_sparse.backend("aot"):
        check(m3_sparse, sets[0], lengths)
        found = {"ours": times(lambda q, k, t: m3_sparse.select_blocks(q, k, t, **lengths), sets)}
        others = peers.prefill_selection(sets[0][0].dtype, sets[0][1].dtype)
        run = lambda peer: measure_peer(m3_sparse, peer, sets, lengths, max(q_lens), times)
        found.update(peers.each(others, chosen, run))
    return found, size, 256 * heads * visible(q_lens, kv_lens)


def prefill_limit(dtype, size, flops, bandwidth, rate):
    """Milliseconds: the larger one of bytes at the copy bandwidth and products at the matrix product's rate."""
    return max(size / bandwidth / 1e6, flops / rate / 1e9 / (2 if dtype == "fp8q" else 1))


def prefill_row(found, dtype, heads, size, flops, bandwidth, limit, **key):
    """The rows of one batch, or of the weighted mean."""
    key.update(op="select", dtype=dtype, heads=str(heads), page=PAGE)
    rows = [protocol.row(bandwidth, *times, size, flops, impl=impl, **key) for impl, times in found.items()]
    return [{**row, "limit_ms": round(limit, 5)} for row in rows]


def measure_prefill(m3_sparse, bandwidth, rate, cases, chosen, results):
    """Prints and writes the rows as they are measured."""
    print("impl | dtype | heads | batch | q_len | kv_len | ms cold | ms warm | TFLOP/s | % of limit")
    for dtype in PREFILL_DTYPES:
        for batch, kv_len, q_len, heads in cases:
            found, size, flops = prefill_case(m3_sparse, dtype, [q_len] * batch, [kv_len] * batch, heads, chosen)
            limit = prefill_limit(dtype, size, flops, bandwidth, rate)
            shape = {"batch": batch, "q_len": q_len, "kv_len": kv_len}
            rows = prefill_row(found, dtype, heads, size, flops, bandwidth, limit, **shape)
            protocol.merge_rows(results, rows)
            for r in rows:
                place = [r[n] for n in ("impl", "dtype", "heads", "batch", "q_len", "kv_len", "ms_cold", "ms_warm")]
                figures = [f"{r['flops'] / r['ms_cold'] / 1e9:.0f}", f"{100 * r['limit_ms'] / r['ms_cold']:.0f}"]
                print(" | ".join(map(str, [*place, *figures])), flush=True)
            torch.cuda.empty_cache()


def measure_weighted(m3_sparse, bandwidth, rate, cases, chosen, late, results):
    """Writes a row a dtype and implementation: means by weight."""
    once = lambda call, sets: (protocol.graph_time(call, sets, WEIGHTED_REPLAYS),) * 2
    for dtype in PREFILL_DTYPES:
        done = []
        for case in cases:
            if late():
                print(f"weighted {dtype}: out of time after {len(done)} of {len(cases)} cases, no mean", flush=True)
                return
            lens = case["query_lens"], case["final_kv_lens"]
            found, size, flops = prefill_case(m3_sparse, dtype, *lens, 4, chosen, once, most=4)
            figures = size, flops, prefill_limit(dtype, size, flops, bandwidth, rate)
            done.append((case["weight"], found, figures))
            torch.cuda.empty_cache()
        total = sum(weight for weight, _, _ in done)
        times, (size, flops, limit) = protocol.weighted_means(f"weighted {dtype}", done)
        protocol.merge_rows(results, prefill_row(times, dtype, 4, round(size), round(flops), bandwidth, limit))
        cells = ", ".join(f"{impl} {pair[0] / 1000:.4f}" for impl, pair in times.items())
        print(f"weighted {dtype}, ms over weight {total:.0f}: {cells}, limit {limit:.4f}", flush=True)


class SelectBlocks(protocol.Benchmark):
    """16 of 64 blocks for 16 requests at 8,192 tokens and 4 index heads."""

    seed = 0
    batch, length, heads = 16, 8192, 4
    key: ClassVar[dict] = {
        "op": "select",
        "heads": str(heads),
        "batch": batch,
        "q_len": 1,
        "kv_len": length,
        "page": PAGE,
    }

    def work(self):
        return self.keys.numel() * self.keys.element_size(), 256 * self.batch * self.heads * self.length

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


class BlockScores(protocol.Benchmark):
    """The scores of 64 blocks for 16 requests at 8,192 tokens and 4 index heads."""

    seed = 0
    batch, length, heads = SelectBlocks.batch, SelectBlocks.length, SelectBlocks.heads
    key: ClassVar[dict] = {**SelectBlocks.key, "op": "score"}
    work, make = SelectBlocks.work, SelectBlocks.make
    setup_bf16, setup_fp8 = SelectBlocks.setup_bf16, SelectBlocks.setup_fp8

    def benchmark_bf16(self) -> None:
        self.out = self.kernel.block_scores(self.q, self.keys, self.table, **self.lengths)

    benchmark_fp8 = benchmark_bf16

    def verify_bf16(self) -> torch.Tensor:
        return definitions.scores(self.q, self.keys, self.table)

    verify_fp8 = verify_bf16


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variant", required=True)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--quick", action="store_true", help="the three shapes of the targets")
    parser.add_argument("--only", choices=("decode", "prefill"))
    parser.add_argument("--cases", type=Path, help="weighted prefills (prefill_cases.json)")
    parser.add_argument("--skip-table", action="store_true", help="only what --cases asks for")
    parser.add_argument("--seconds", type=float, default=400, help="start no new weighted case after this time")
    peers.add_option(parser)
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    m3_sparse = protocol.load(options.variant)
    torch.manual_seed(0)
    bandwidth = protocol.copy_bandwidth()
    rows = []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {bandwidth:.0f} GB/s")
    print(f"peers: {', '.join(peers.importable()) or 'none importable'}", flush=True)
    if not options.skip_table and options.only != "prefill":
        for dtype in ("bf16", "fp8"):
            for case in QUICK if options.quick else CASES:
                rows += measure(m3_sparse, dtype, *case, bandwidth, options.peers)
                torch.cuda.empty_cache()
        protocol.merge_rows(options.results, [r for r in rows if r["op"] == "select"])
        protocol.print_table(rows, ("op", "impl", "dtype", "heads", "batch", "q_len", "kv_len"), bandwidth)
    rate = protocol.matmul_rate()
    print(f"cuBLAS bf16 8192^3: {rate:.0f} TFLOP/s")
    if not options.skip_table and options.only != "decode":
        cases = PREFILL_CASES[:10:3] if options.quick else PREFILL_CASES
        measure_prefill(m3_sparse, bandwidth, rate, cases, options.peers, options.results)
    if options.cases:
        late = lambda: time.time() - STARTED > options.seconds
        cases = protocol.weighted_cases(options.cases)
        measure_weighted(m3_sparse, bandwidth, rate, cases, options.peers, late, options.results)


if __name__ == "__main__":
    main()
