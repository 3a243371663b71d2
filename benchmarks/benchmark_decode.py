"""Sparse decode attention on one GPU: time a call over batch, heads, dtype and draft tokens, cold and warm.

    python benchmarks/benchmark_decode.py --variant build/torch-stable-abi211-cu130-x86_64-linux [--quick]
        [--results FILE] [--cases decode_cases.json] [--seconds 400] [--peers NAME ...]

Protocol: a case is a CUDA graph of calls on inputs that rotate past twice the L2 ("cold"), or of 20 calls on one input
("warm"); the figure is the median over replays of (graph time / calls). Every case times the public function's own
choice and every forced number of splits (CTAs a row), whose results must have the same bits; rows of the first
call are checked against float64. Bytes: K and V of every distinct (request, block) of a call, read once, and queries
and outputs. The copy bandwidth (read + written) is measured in the same run; `limit` is bytes over it. Selections:
"random" is uniform plus the local block; "correlated" keeps each block of the token before with probability 0.87,
else draws a new one (the number of distinct blocks of a request is printed). The last table is the sweep over splits:
it sets the thresholds of torch-ext/launch/decode.cpp. Peers (peers.py) run on the same problems, and their answers are
compared with the checked one. `--cases` adds one row a dtype and selection without batch and kv_len: the weighted means
over the cases that have a weight.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import ClassVar

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

import definitions
import peers
import protocol

DIM, BLOCK, TOPK = 128, 128, 16
ROTATE_BYTES = 130 << 20
SPLITS = (1, 2, 4, 16)  # CTAs a row
DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
STARTED = time.time()


def graph_time(calls):
    """Median microseconds a call, over replays of one graph that holds all the calls."""
    return protocol.graph_time(lambda call: call(), [(call,) for call in calls])


# ---- problems


class Pool:
    """Pages of one dtype and head count, handed out to requests at random; every call's inputs are views of it."""

    def __init__(self, dtype, heads, gigabytes, page=128):
        self.dtype, self.page, (self.q_heads, self.kv_heads) = dtype, page, heads
        tdtype = DTYPES[dtype]
        self.size = tdtype.itemsize
        page_bytes = self.kv_heads * page * DIM * self.size
        self.pages = int(gigabytes * (1 << 30)) // (2 * page_bytes)
        shape = (self.pages, self.kv_heads, page, DIM)
        seed = torch.randn(1 << 22, device="cuda").to(tdtype).view(torch.uint8)
        self.k, self.v = (torch.empty(shape, dtype=tdtype, device="cuda") for _ in range(2))
        for cache in (self.k, self.v):
            flat = cache.view(torch.uint8).view(-1)
            for first in range(0, flat.numel(), seed.numel()):
                part = flat[first : first + seed.numel()]
                part.copy_(seed[: part.numel()])
        self.order = torch.randperm(self.pages, device="cuda").to(torch.int32)
        self.taken = 0
        self._packed = None

    def packed(self):
        """The same numbers as the peers take them, [pages, heads, page, 256]; made once."""
        if self._packed is None:
            self._packed = peers.packed(self.k, self.v)
        return self._packed

    def table(self, rows, width):
        count = rows * width
        index = (torch.arange(count, device="cuda") + self.taken) % self.pages
        self.taken = (self.taken + count) % self.pages
        return self.order[index].view(rows, width)


def selection(kv_lens, q_len, kv_heads, kind, generator):
    """[T, Hkv, 16] int32, ascending, then -1; and the number of distinct (request, head, block)."""
    rows, distinct = [], 0
    for length in kv_lens:
        blocks = -(-length // BLOCK)
        count = min(blocks, TOPK)
        chosen = None
        masks = torch.zeros(kv_heads, blocks, dtype=torch.bool)
        for _ in range(q_len):
            score = torch.rand(kv_heads, blocks, generator=generator)
            if kind == "correlated" and chosen is not None:
                keep = torch.rand(kv_heads, count, generator=generator) < 0.87
                score.scatter_(1, chosen, torch.where(keep, 2.0, score.gather(1, chosen) * 0.5))
            score[:, -1] = 3.0
            chosen = score.topk(count, 1).indices
            masks.scatter_(1, chosen, True)
            row = torch.full((kv_heads, TOPK), -1, dtype=torch.int32)
            row[:, :count] = chosen.sort(1).values.to(torch.int32)
            rows.append(row)
        distinct += int(masks.sum())
    return torch.stack(rows).cuda(), distinct


class Problem:
    def __init__(self, pool, kv_lens, q_len, kind, seed):
        generator = torch.Generator().manual_seed(seed)
        batch = len(kv_lens)
        tokens = batch * q_len
        self.q = torch.randn(tokens, pool.q_heads, DIM, device="cuda").to(torch.bfloat16)
        self.ids, self.distinct = selection(kv_lens, q_len, pool.kv_heads, kind, generator)
        self.table = pool.table(batch, -(-max(kv_lens) // pool.page))
        self.cu = torch.arange(0, tokens + 1, q_len, dtype=torch.int32, device="cuda")
        self.used = torch.tensor(kv_lens, dtype=torch.int32, device="cuda")
        self.out, self.lse = torch.empty_like(self.q), torch.empty(tokens, pool.q_heads, device="cuda")
        self.scale = None if pool.size == 2 else torch.ones(1, device="cuda")
        self.pool = pool
        blocks = self.distinct * BLOCK * DIM * 2 * pool.size
        self.bytes = blocks + 2 * self.q.numel() * 2 + self.lse.numel() * 4
        seen = sum(min(-(-length // BLOCK), TOPK) for length in kv_lens) * q_len * BLOCK
        self.flops = 4 * pool.q_heads * DIM * seen

    def call(self, operator, splits=0, overlap=True):
        def launch():
            operator(
                self.out,
                self.lse,
                self.q,
                self.pool.k,
                self.pool.v,
                self.ids,
                self.table,
                self.cu,
                self.used,
                DIM**-0.5,
                True,
                self.scale,
                self.scale,
                splits,
                overlap,
            )

        return launch

    def public(self, m3_sparse):
        def launch():
            m3_sparse.sparse_attention(
                self.q,
                self.pool.k,
                self.pool.v,
                self.ids,
                self.table,
                cu_seqlens_q=self.cu,
                seqused_k=self.used,
                k_scale=self.scale,
                v_scale=self.scale,
                out=self.out,
                lse=self.lse,
            )

        return launch

    def for_peers(self):
        q_len = self.q.shape[0] // self.used.numel()
        return peers.paged(self.q, self.pool.packed(), None, self.ids, self.table, self.cu, self.used, q_len)

    def check(self, row):
        """One row against float64; raises if it is off."""
        pool, q_len = self.pool, self.q.shape[0] // self.used.numel()
        b = row // q_len
        end = int(self.used[b]) - q_len + row % q_len + 1
        group = pool.q_heads // pool.kv_heads
        for head in range(pool.kv_heads):
            blocks = [x for x in self.ids[row, head].tolist() if 0 <= x * BLOCK < end]
            position = (torch.tensor(blocks)[:, None] * BLOCK + torch.arange(BLOCK)).flatten().cuda()
            position = position[position < end]
            page = self.table[b][position // pool.page].long()
            raw = [x.view(torch.uint8) if pool.size == 1 else x for x in (pool.k, pool.v)]
            key, value = (x[page, head, position % pool.page].view(pool.k.dtype).double() for x in raw)
            part = slice(head * group, (head + 1) * group)
            logits = self.q[row, part].double() @ key.T * DIM**-0.5
            want = torch.softmax(logits, -1) @ value
            error = float((self.out[row, part].double() - want).norm() / want.norm())
            gap = float((self.lse[row, part].double() - torch.logsumexp(logits, -1)).abs().max())
            if not (error < 5e-3 and gap < 1e-3):
                raise AssertionError(f"row {row} head {head}: relative error {error:.1e}, lse {gap:.1e}")


# ---- measurement


def measure_peer(peer, problems, want):
    """(cold, warm) of one peer on our problems, the first answer compared."""
    inputs = [p.for_peers() for p in problems]
    calls = [peer.prepare(x) for x in inputs]
    calls[0]()
    torch.cuda.synchronize()
    peers.check_attention(peer.name, inputs[0].out, want)
    return graph_time(calls), graph_time(calls[:1] * 20)


def measure(m3_sparse, operator, pool, name, kv_lens, q_len, kind, bandwidth, splits, plain=False, chosen=()):
    """One row of the results: cold and warm of the public function, cold of each number of splits, the peers."""
    first = Problem(pool, kv_lens, q_len, kind, 0)
    # Distinct problems until they exceed what L2 could keep; a large call rotates by itself.
    count = max(2, min(48, -(-ROTATE_BYTES // first.bytes)))
    problems = [first] + [Problem(pool, kv_lens, q_len, kind, 1 + i) for i in range(count - 1)]
    reference = None
    for s in splits:
        first.out.fill_(float("nan"))
        first.call(operator, s)()
        torch.cuda.synchronize()
        if reference is None:
            reference = first.out.clone(), first.lse.clone()
            for row in {0, first.q.shape[0] - 1, first.q.shape[0] // 2}:
                first.check(row)
        elif not (torch.equal(first.out, reference[0]) and torch.equal(first.lse, reference[1])):
            raise AssertionError(f"{name}: splits {s} gives other bits than {splits[0]}")
    times = {s: graph_time([p.call(operator, s) for p in problems]) for s in splits}
    row = {
        "case": name,
        "dtype": pool.dtype,
        "heads": f"{pool.q_heads}/{pool.kv_heads}",
        "batch": len(kv_lens),
        "q_len": q_len,
        "kv_len": max(kv_lens),
        "selection": kind,
        "page": pool.page,
        "cold": graph_time([p.public(m3_sparse) for p in problems]),
        "warm": graph_time([first.public(m3_sparse)] * 20),
        "bytes": first.bytes,
        "flops": first.flops,
        "limit": first.bytes / bandwidth,
        "splits": times,
        "distinct": first.distinct / (len(kv_lens) * pool.kv_heads),
    }
    # Peers take whole selections, pages of 128 tokens and one q_len.
    if pool.page == 128 and min(kv_lens) - q_len + 1 > BLOCK * (TOPK - 1):
        found = peers.attention(pool.k.dtype)
        row["peers"] = dict(peers.each(found, chosen, lambda peer: measure_peer(peer, problems, reference[0])))
    if plain:  # without programmatic dependent launch
        row["no_overlap"] = {s: graph_time([p.call(operator, s, False) for p in problems]) for s in splits}
    return row


ONE = [(batch, 1, "random") for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256)]
DRAFTS = [(16, 4, "random"), (16, 4, "correlated"), (16, 8, "correlated")]
KV_LEN = 32768
# With KV_LEN: 64 requests over the length of the context, which attention doesn't see.
CURVE = [(64, 1, "random", kv_len) for kv_len in (4096, 8192, 16384, 65536, 131072)]
GRID = [  # (dtype, heads, [(batch, q_len, selection[, kv_len])])
    ("bf16", (64, 4), ONE + DRAFTS + CURVE),
    ("fp8", (64, 4), ONE + DRAFTS + [(64, 4, "random"), (64, 4, "correlated")] + CURVE),
    ("fp8", (16, 1), [(1, 1, "random"), (16, 1, "random"), (64, 1, "random"), (256, 1, "random")]),
    ("bf16", (16, 1), [(1, 1, "random"), (64, 1, "random")]),
    ("fp8_e5m2", (64, 4), [(64, 1, "random")]),
]
QUICK = {(1, 1), (16, 1), (64, 1), (256, 1), (16, 4)}


def record(rows, path, bandwidth):
    """Merge into the results file by key: ours and the peers'."""
    entries = []
    for row in rows:
        key = {name: row[name] for name in ("dtype", "heads", "batch", "q_len", "kv_len", "selection", "page")}
        times = {"ours": (row["cold"], row["warm"]), **row.get("peers", {})}
        for impl, (cold, warm) in times.items():
            figures = (cold, warm, row["bytes"], row["flops"])
            entries.append(protocol.row(bandwidth / 1000, *figures, op="decode", impl=impl, **key))
    protocol.merge_rows(path, entries)


def show(rows, bandwidth):
    print("\ncase | cold us | GB/s | % copy | warm us | limit us | distinct blocks a request and head")
    for r in rows:
        rate = r["bytes"] / r["cold"]
        print(
            f"{r['case']} | {r['cold']:.2f} | {rate / 1000:.0f} | {100 * rate / bandwidth:.0f} | {r['warm']:.2f} | "
            f"{r['limit']:.2f} | {r['distinct']:.1f}"
        )
    print("\npeers, us cold (warm)")
    for r in rows:
        cells = [f"{name} {cold:.2f} ({warm:.2f})" for name, (cold, warm) in r.get("peers", {}).items()]
        print(f"{r['case']} | ours {r['cold']:.2f} ({r['warm']:.2f}) | " + " | ".join(cells))
    print("\nsweep, cold us: splits: with overlap (without)")
    for r in rows:
        best = min(r["splits"], key=r["splits"].get)
        plain = r.get("no_overlap", {})
        cells = [f"{s}: {t:.2f}" + (f" ({plain[s]:.2f})" if s in plain else "") for s, t in r["splits"].items()]
        print(f"{r['case']} | {'  '.join(cells)} | best {best}, chosen {r['cold']:.2f}")


class SparseAttention(protocol.Benchmark):
    """A decode step of 16 requests at 4,096 tokens: 64 query heads on 4 KV heads, 16 blocks of 128 each."""

    seed = 0
    batch, length, heads, kv_heads = 16, 4096, 64, 4
    key: ClassVar[dict] = {
        "op": "decode",
        "heads": f"{heads}/{kv_heads}",
        "batch": batch,
        "q_len": 1,
        "kv_len": length,
        "page": BLOCK,
    }
    key.update(selection="random")

    def make(self, dtype) -> None:
        self.q = torch.randn(self.batch, self.heads, DIM, device=self.device).bfloat16()
        self.k, self.v, _, self.table = definitions.paged(self.batch, self.length, self.kv_heads, dtype, self.device)
        scores = torch.rand(self.batch, self.kv_heads, self.length // BLOCK, device=self.device)
        self.blocks = scores.topk(TOPK).indices.int()
        self.lengths = definitions.lengths(self.batch, self.length, self.device)

    def setup_bf16(self) -> None:
        self.make(torch.bfloat16)

    def setup_fp8(self) -> None:
        self.make(torch.float8_e4m3fn)

    def work(self):
        blocks = 2 * self.batch * self.kv_heads * TOPK * BLOCK * DIM * self.k.element_size()
        return blocks + 4 * self.q.numel(), 4 * self.batch * self.heads * DIM * TOPK * BLOCK

    def benchmark_bf16(self) -> None:
        self.out = self.kernel.sparse_attention(self.q, self.k, self.v, self.blocks, self.table, **self.lengths)

    benchmark_fp8 = benchmark_bf16

    def verify_bf16(self) -> torch.Tensor:
        return definitions.attention(self.q, self.k, self.v, self.table, self.blocks)

    verify_fp8 = verify_bf16


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variant", required=True)
    parser.add_argument("--results", "--json", type=Path, help="results file to merge into")
    parser.add_argument("--cases", type=Path, help="weighted cases (decode_cases.json)")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--skip-table", action="store_true", help="only what --cases asks for")
    peers.add_option(parser)
    parser.add_argument("--seconds", type=float, default=400, help="start no new case after this time")
    options = parser.parse_args()
    m3_sparse = protocol.load(options.variant)
    from m3_sparse import ops

    operator = getattr(ops, "ops", ops).aot_sparse_attention.default
    torch.manual_seed(0)
    bandwidth = 1000 * protocol.copy_bandwidth()  # bytes a microsecond
    card = torch.cuda.get_device_name()
    print(f"{card}, torch {torch.__version__}, copy {bandwidth / 1000:.0f} GB/s", flush=True)
    print(f"peers: {', '.join(peers.importable()) or 'none importable'}", flush=True)
    rows, late = [], lambda: time.time() - STARTED > options.seconds
    for dtype, heads, shapes in () if options.skip_table else GRID:
        pool = Pool(dtype, heads, 18 if heads[1] == 4 and dtype == "bf16" else 9 if heads[1] == 4 else 4)
        for batch, q_len, kind, *rest in shapes:
            kv_len = rest[0] if rest else KV_LEN
            if late() or (options.quick and (rest or (batch, q_len) not in QUICK)):
                continue
            name = f"{dtype} {heads[0]}/{heads[1]} B{batch} q{q_len} kv{kv_len} {kind}"
            plain = q_len == 1 and batch in (1, 16, 64) and not rest
            splits = SPLITS[:2] if rest else SPLITS
            case = (pool, name, [kv_len] * batch, q_len, kind, bandwidth, splits, plain, options.peers)
            rows.append(measure(m3_sparse, operator, *case))
            print(f"[{time.time() - STARTED:.0f} s] {name}: {rows[-1]['cold']:.2f} us", flush=True)
        del pool
        torch.cuda.empty_cache()
    show(rows, bandwidth)
    if options.results and rows:
        record(rows, options.results, bandwidth)
    if options.cases:
        means = weighted(m3_sparse, operator, options.cases, bandwidth, late)
        if options.results:
            record(means, options.results, bandwidth)


def weighted(m3_sparse, operator, path, bandwidth, late):
    """The weighted decode cases (8 draft tokens a request): a row a dtype and selection, means by weight."""
    means = []
    cases = json.loads(path.read_text())["cases"]
    for dtype in ("bf16", "fp8"):
        pool = Pool(dtype, (64, 4), 12)
        for kind in ("random", "correlated"):
            done = []
            for case in cases:
                if late():
                    break
                name = f"{dtype} {kind} {case['kind']} B{case['B']} S{case['S']}"
                row = measure(m3_sparse, operator, pool, name, case["seq_lens"], case["q_len"], kind, bandwidth, (1, 4))
                print(f"{name}: {row['cold']:.2f} us, limit {row['limit']:.2f}, weight {case['weight']}", flush=True)
                done.append((case["weight"] or 0, row))
            total = sum(weight for weight, _ in done)
            if len(done) < len(cases):
                print(f"{dtype} {kind}: out of time after {len(done)} of {len(cases)} cases, no mean", flush=True)
                continue
            keys = ("cold", "warm", "bytes", "flops", "limit")
            mean = {key: sum(weight * row[key] for weight, row in done) / total for key in keys}
            mean.update(bytes=round(mean["bytes"]), flops=round(mean["flops"]), batch=None, kv_len=None)
            means.append({**done[0][1], **mean})
            print(f"weighted mean {dtype} {kind}: {mean['cold']:.2f} us over weight {total:.0f}", flush=True)
        del pool
        torch.cuda.empty_cache()
    return means


if __name__ == "__main__":
    main()
