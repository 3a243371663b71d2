"""Sparse prefill attention on one GPU: the default and every forced formulation, over length, selection and dtype.

    python benchmarks/benchmark_prefill.py --variant build/torch-stable-abi211-cu130-x86_64-linux [--results FILE]
        [--cases prefill_cases.json] [--curve] [--end-to-end] [--sweep] [--broken] [--skip-table] [--peers NAME ...]
        [--seconds 300]

64/4 heads, pages of 128 at random places, causal, queries the last q_len tokens; selections and u(4) by selections.py.
Protocol: a case is a CUDA graph of one call of the public function. Cold: the median over replays, each behind a write of
256 MiB; warm: graphs of several calls one after the other. Rows of the first call are checked against float64. "limit" is
the useful products at the tensor cores' dense rate of this card, measured in the same run by a matrix product.
--cases adds rows without batch and lengths: means by weight over the cases of a file ({"cases": [{"query_lens",
"final_kv_lens", "weight"}]}), of the default and the peers, 4 replays a case; a peer that doesn't serve all of them gets
no such row. --curve: the default and the peers over the length of the context, whole prompts and 4,096 new tokens,
where the table's cases are not already.
--end-to-end: selection and attention of a 131,072-token prompt, with the memory they take above inputs and outputs.
--sweep: short queries, by every formulation: where torch-ext/launch/prefill.cpp puts its thresholds.
--broken: what NaN in V costs, by the share of blocks that hold one: tiles whose rows see one are computed once more.
Peers (peers.py) run on the same problems in the same run; their answers are compared with ours.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import ClassVar

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

import definitions
import peers
import protocol
import selections

DIM, BLOCK, TOPK, HEADS, KV_HEADS = 128, 128, 16, 64, 4
DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
FORMULATIONS = ("union", "kv_stationary")
KINDS = ("random", "correlated")
CASES = [(8192, 8192), (32768, 32768), (8192, 131072), (4096, 131072), (512, 65536)]  # q_len, kv_len
CURVE = [(n, n) for n in (4096, 8192, 16384, 32768, 65536)] + [(4096, n) for n in (32768, 65536, 131072)]
WEIGHTED_REPLAYS = 4
STARTED = time.time()
FLUSH_BYTES = 256 << 20


class Case:
    def __init__(self, dtype, q_lens, kv_lens, kind, seed=0):
        cache = DTYPES[dtype]
        torch.manual_seed(seed)
        self.dtype, self.kind, self.q_lens, self.kv_lens = dtype, kind, q_lens, kv_lens
        tokens, width = sum(q_lens), max(-(-n // BLOCK) for n in kv_lens)
        pages = sum(-(-n // BLOCK) for n in kv_lens)
        self.k, self.v = (torch.empty(pages, KV_HEADS, BLOCK, DIM, dtype=cache, device="cuda") for _ in range(2))
        for x in (self.k, self.v):
            for part in x.split(2048):
                part.copy_(torch.randn(part.shape, device="cuda"))
        self.q = torch.randn(tokens, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        order = torch.randperm(pages, device="cuda").to(torch.int32)
        self.table = torch.zeros(len(q_lens), width, dtype=torch.int32, device="cuda")
        first = 0
        for b, n in enumerate(kv_lens):
            count = -(-n // BLOCK)
            self.table[b, :count] = order[first : first + count]
            first += count
        self.cu = torch.tensor([0, *q_lens], device="cuda").cumsum(0).to(torch.int32)
        self.used = torch.tensor(kv_lens, dtype=torch.int32, device="cuda")
        self.scale = None if dtype == "bf16" else torch.ones(1, device="cuda")
        self.out, self.lse = torch.empty_like(self.q), torch.empty(tokens, HEADS, device="cuda")
        self.draw(kind)

    def draw(self, kind):
        self.kind = kind
        self.ids = selections.batch(kind, KV_HEADS, self.q_lens, self.kv_lens)
        unions = [(n, selections.union(ids, 4)) for n, ids in zip(self.q_lens, self.ids.split(self.q_lens)) if n >= 4]
        self.u = sum(n * u for n, u in unions) / max(1, sum(n for n, _ in unions))  # by tokens
        starts = [kv - q for q, kv in zip(self.q_lens, self.kv_lens)]
        position = torch.cat([torch.arange(s, kv, device="cuda") for s, kv in zip(starts, self.kv_lens)])
        visible = (position[:, None, None] + 1 - self.ids.long() * BLOCK).clamp(max=BLOCK) * (self.ids >= 0)
        self.flops = 4 * (HEADS // KV_HEADS) * DIM * int(visible.sum())
        self.bytes = 2 * self.q.numel() * 2 + self.lse.numel() * 4 + 2 * self.k.numel() * self.k.element_size()

    def run(self, m3_sparse, formulation=None):
        options = {"cu_seqlens_q": self.cu, "seqused_k": self.used, "k_scale": self.scale, "v_scale": self.scale}
        outputs = {"out": self.out, "lse": self.lse, "formulation": formulation}
        m3_sparse.sparse_attention(self.q, self.k, self.v, self.ids, self.table, **options, **outputs)

    def check(self, what):
        """Some rows against float64."""
        tokens = self.q.shape[0]
        error, norm = 0.0, 0.0
        for row in sorted({0, 1, tokens // 3, tokens // 2 + 5, tokens - 2, tokens - 1}):
            row = min(max(row, 0), tokens - 1)
            b = int((self.cu[1:] <= row).sum())
            end = self.kv_lens[b] - int(self.cu[b + 1]) + row + 1
            for head in range(KV_HEADS):
                blocks = self.ids[row, head].long()
                position = (blocks[blocks >= 0][:, None] * BLOCK + torch.arange(BLOCK, device="cuda")).flatten()
                position = position[position < end]
                page = self.table[b][position // BLOCK].long()
                raw = [x.view(torch.uint8) if x.element_size() == 1 else x for x in (self.k, self.v)]
                key, value = (x[page, head, position % BLOCK].view(self.k.dtype).double() for x in raw)
                part = slice(head * 16, head * 16 + 16)
                logits = self.q[row, part].double() @ key.T * DIM**-0.5
                want = torch.softmax(logits, -1) @ value
                error += float((self.out[row, part].double() - want).pow(2).sum())
                norm += float(want.pow(2).sum())
                gap = float((self.lse[row, part].double() - torch.logsumexp(logits, -1)).abs().max())
                if not gap < 1e-3:
                    raise AssertionError(f"{what}: row {row} head {head}: lse off by {gap:.1e}")
        if not (error / norm) ** 0.5 < 5e-3:
            raise AssertionError(f"{what}: relative error {(error / norm) ** 0.5:.1e}")


def graph_of(call, calls):
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return graph


def timed(call, flush, replays):
    """Milliseconds a call: (cold, warm)."""
    times = []
    graph = graph_of(call, 1)
    for done in range(replays + 1):
        if done > protocol.LONG_REPLAYS and times[-1] > protocol.LONG / 1000:
            break
        flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    cold = statistics.median(times[1:])
    calls = max(1, min(20, int(4 / cold)))
    graph, times = graph_of(call, calls), []
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / calls)
    return cold, statistics.median(times)


def measure(m3_sparse, case, flush, formulations, replays=protocol.REPLAYS):
    """{formulation: (cold ms, warm ms)}; None stands for the default."""
    result = {}
    for formulation in (None, *formulations):
        case.out.fill_(float("nan"))
        case.lse.fill_(float("nan"))
        try:
            case.run(m3_sparse, formulation)
        except NotImplementedError as error:
            print(f"  {formulation}: {error}")
            continue
        torch.cuda.synchronize()
        if torch.isnan(case.lse).any():
            raise AssertionError(f"{formulation}: a row was not written")
        case.check(formulation)
        result[formulation] = timed(lambda f=formulation: case.run(m3_sparse, f), flush, replays)
    return result


def measure_peers(case, flush, options, replays=protocol.REPLAYS):
    """[(name, (cold ms, warm ms))] of the peers on the case that was just run; `case.out` has our answer."""

    def run(peer):
        problem = peers.paged(case.q, case.k, case.v, case.ids, case.table, case.cu, case.used, max(case.q_lens))
        call = peer.prepare(problem)
        call()
        torch.cuda.synchronize()
        peers.check_attention(peer.name, problem.out, case.out)
        return timed(call, flush, replays)

    return peers.each(peers.attention(case.k.dtype, prefill=True), options.peers, run)


def late(options):
    return time.time() - STARTED > options.seconds


def rows_of(case, found, rate, **shape):
    """[impl, (cold ms, warm ms)] as rows of one case; the limit is that of the products."""
    key: ClassVar[dict] = {
        "op": "prefill",
        "dtype": case.dtype,
        "heads": f"{HEADS}/{KV_HEADS}",
        "page": BLOCK,
        "selection": case.kind,
    }
    rows = []
    for impl, pair in found:
        row = protocol.row(1, *(t * 1000 for t in pair), case.bytes, case.flops, **key, **shape, impl=impl)
        rows.append({**row, "limit_ms": round(case.flops / rate / 1e9, 5), "u4": round(case.u, 3)})
    return rows


def table(m3_sparse, options, flush, rate, cases, formulations):
    """Rows of the default, the forced formulations and the peers, written as they are measured."""
    titles = ["dtype", "q / kv", "selection", "u(4)", "default ms", "TFLOP/s", "% of limit", *formulations, "warm"]
    print("\n" + " | ".join(titles))
    for dtype in options.dtype or DTYPES:
        for q_len, kv_len in cases:
            if dtype == "fp8" and (q_len, kv_len) == (8192, 131072):
                continue
            case = None
            for kind in KINDS:
                if late(options):
                    return
                if case is None:
                    case = Case(dtype, [q_len], [kv_len], kind)
                else:
                    case.draw(kind)
                found = measure(m3_sparse, case, flush, formulations)
                cold, warm = found[None]
                cells = [f"{found[f][0]:.3f}" if f in found else "-" for f in formulations]
                useful = case.flops / cold / 1e9
                place = [dtype, f"{q_len} / {kv_len}", kind, f"{case.u:.2f}", f"{cold:.3f}", f"{useful:.0f}"]
                print(" | ".join([*place, f"{100 * useful / rate:.0f}", *cells, f"{warm:.3f}"]), flush=True)
                named = [("ours", found[None]), *((f"ours, {f}", found[f]) for f in formulations if f in found)]
                for name, (peer_cold, peer_warm) in (others := measure_peers(case, flush, options)):
                    print(f"    {name}: {peer_cold:.3f}, warm {peer_warm:.3f}", flush=True)
                rows = rows_of(case, [*named, *others], rate, batch=1, q_len=q_len, kv_len=kv_len)
                protocol.merge_rows(options.results, rows)
            del case
            torch.cuda.empty_cache()


def sweep(m3_sparse, options, flush):
    """Short queries by every formulation."""
    print("\nshort queries, ms cold: dtype | batch x q_len / kv | selection | default | decode | union | kv_stationary")
    for dtype in options.dtype or DTYPES:
        for batch, q_len, kv_len in [(1, 17, 65536), (1, 32, 65536), (1, 64, 65536), (1, 128, 65536), (1, 256, 65536),
                                     (1, 171, 55339), (8, 17, 32768), (8, 32, 32768), (8, 64, 32768), (8, 128, 32768)]:  # fmt: skip
            for kind in KINDS:
                if late(options):
                    return
                case = Case(dtype, [q_len] * batch, [kv_len] * batch, kind)
                found = measure(m3_sparse, case, flush, ("decode", *FORMULATIONS), 8)
                cells = " | ".join(f"{found[f][0]:.4f}" if f in found else "-" for f in (None, "decode", *FORMULATIONS))
                print(f"{dtype} | {batch} x {q_len} / {kv_len} | {kind} | {cells}", flush=True)


def broken(m3_sparse, options, flush):
    """One NaN in the first token of some blocks' V."""
    print("\nNaN in V, ms cold: dtype | q / kv | selection | blocks with one | rows with one | union | kv_stationary")
    for dtype in options.dtype or DTYPES:
        for kind in KINDS:
            case = Case(dtype, [8192], [8192], kind)
            pages = case.table[0].long()
            for count in (0, 1, 4, 16, len(pages)):
                if late(options):
                    return
                raw = case.v.view(torch.uint8)
                raw[pages[:count], :, 0, case.v.element_size() - 1] = 0x7F  # of bf16 the upper byte
                if dtype == "bf16":
                    raw[pages[:count], :, 0, 0] = 0xFF
                cells = []
                for formulation in FORMULATIONS:
                    cold, _ = timed(lambda c=case, f=formulation: c.run(m3_sparse, f), flush, 8)
                    cells.append(f"{cold:.3f}")
                rows = torch.isnan(case.out).any(2).float().mean().item()
                print(
                    " | ".join([dtype, "8192 / 8192", kind, f"{count} of {len(pages)}", f"{rows:.0%}", *cells]),
                    flush=True,
                )
            del case
            torch.cuda.empty_cache()


class Mean:
    """What rows_of wants of a case, of the mean over many."""

    def __init__(self, dtype, kind, size, flops, u):
        self.dtype, self.kind, self.bytes, self.flops, self.u = dtype, kind, round(size), round(flops), u


def weighted(m3_sparse, options, flush, rate):
    """A row a dtype, selection and implementation: means by weight of the default's and the peers' time."""
    cases = protocol.weighted_cases(options.cases)
    for dtype in options.dtype or DTYPES:
        done = {kind: [] for kind in KINDS}
        for i, c in enumerate(cases):
            if late(options):
                print(f"weighted {dtype}: out of time after {i} of {len(cases)} cases, no mean", flush=True)
                return
            case = Case(dtype, c["query_lens"], c["final_kv_lens"], KINDS[0])
            for kind in KINDS:
                if kind != case.kind:
                    case.draw(kind)
                found = {"ours": measure(m3_sparse, case, flush, (), WEIGHTED_REPLAYS)[None]}
                found.update(measure_peers(case, flush, options, WEIGHTED_REPLAYS))
                done[kind].append((c["weight"], found, (case.bytes, case.flops, case.u)))
            del case
            torch.cuda.empty_cache()
        for kind in KINDS:
            label = f"weighted {dtype} {kind}"
            times, figures = protocol.weighted_means(label, done[kind])
            mean = Mean(dtype, kind, *figures)
            protocol.merge_rows(options.results, rows_of(mean, times.items(), rate))
            cells = ", ".join(f"{impl} {pair[0]:.4f}" for impl, pair in times.items())
            weight = sum(weight for weight, _, _ in done[kind])
            print(f"{label}, ms over weight {weight:.0f}: {cells}; limit {mean.flops / rate / 1e9:.4f}", flush=True)


def end_to_end(m3_sparse, dtype, tokens=131072):
    """Selection and attention of one sparse layer's whole prompt, and the memory above inputs and outputs."""
    case = Case(dtype, [tokens], [tokens], "random")
    index_q = torch.randn(tokens, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    index_k = torch.randn(case.k.shape[0], BLOCK, DIM, device="cuda").to(DTYPES[dtype])
    lengths = {"cu_seqlens_q": case.cu, "seqused_k": case.used}

    def layer():
        m3_sparse.select_blocks(index_q, index_k, case.table, **lengths, topk=TOPK, out=case.ids)
        case.run(m3_sparse)

    layer()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    layer()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    case.check("end to end")
    times = []
    for _ in range(4):
        start, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        start.record()
        m3_sparse.select_blocks(index_q, index_k, case.table, **lengths, topk=TOPK, out=case.ids)
        middle.record()
        case.run(m3_sparse)
        end.record()
        end.synchronize()
        times.append((start.elapsed_time(middle), middle.elapsed_time(end)))
    select, attend = (statistics.median(t[i] for t in times[1:]) for i in range(2))
    print(f"end to end {dtype} {tokens}: select {select:.2f} + attend {attend:.2f} = {select + attend:.2f} ms, "
          f"scratch {peak / 2**20:.0f} MiB, u(4) {selections.union(case.ids, 4):.2f}")  # fmt: skip


class SparsePrefill(protocol.Benchmark):
    """A prompt of 256 tokens behind 1,792 cached ones: 64 query heads on 4 KV heads, 16 blocks of 128 each."""

    seed = 0
    q_len, length = 256, 2048
    key: ClassVar[dict] = {
        "op": "prefill",
        "heads": f"{HEADS}/{KV_HEADS}",
        "batch": 1,
        "q_len": q_len,
        "kv_len": length,
        "page": BLOCK,
    }
    key.update(selection="random")

    def make(self, dtype) -> None:
        self.q = torch.randn(self.q_len, HEADS, DIM, device=self.device).bfloat16()
        self.k, self.v, _, self.table = definitions.paged(1, self.length, KV_HEADS, dtype, self.device)
        scores = torch.rand(self.q_len, KV_HEADS, self.length // BLOCK, device=self.device)
        self.blocks = scores.topk(TOPK).indices.int()
        lengths = {"cu_seqlens_q": [0, self.q_len], "seqused_k": [self.length]}
        self.lengths = {name: torch.tensor(x, dtype=torch.int32, device=self.device) for name, x in lengths.items()}

    def work(self):
        """Of whole blocks: the last one of a row is cut by the mask."""
        size = 2 * self.k.numel() * self.k.element_size() + 4 * self.q.numel()
        return size, 4 * HEADS * DIM * self.q_len * TOPK * BLOCK

    def setup_bf16(self) -> None:
        self.make(torch.bfloat16)

    def setup_fp8(self) -> None:
        self.make(torch.float8_e4m3fn)

    def benchmark_bf16(self) -> None:
        self.out = self.kernel.sparse_attention(self.q, self.k, self.v, self.blocks, self.table, **self.lengths)

    benchmark_fp8 = benchmark_bf16

    def verify_bf16(self) -> torch.Tensor:
        return definitions.attention(self.q, self.k, self.v, self.table, self.blocks, start=self.length - self.q_len)

    verify_fp8 = verify_bf16


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variant", required=True)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--cases", type=Path)
    parser.add_argument("--dtype", action="append", choices=list(DTYPES))
    parser.add_argument("--end-to-end", action="store_true")
    parser.add_argument("--curve", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--broken", action="store_true")
    parser.add_argument("--skip-table", action="store_true", help="only what the other options ask for")
    peers.add_option(parser)
    parser.add_argument("--seconds", type=float, default=300, help="start no new case after this time")
    options = parser.parse_args()
    m3_sparse = protocol.load(options.variant)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    rate = protocol.matmul_rate()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16 matrix product {rate:.0f} TFLOP/s", flush=True
    )
    if not options.skip_table:
        table(m3_sparse, options, flush, rate, CASES, FORMULATIONS)
    if options.curve:
        table(m3_sparse, options, flush, rate, [case for case in CURVE if case not in CASES], ())
    if options.sweep:
        sweep(m3_sparse, options, flush)
    if options.broken:
        broken(m3_sparse, options, flush)
    if options.cases:
        weighted(m3_sparse, options, flush, rate)
    if options.end_to_end:
        for dtype in options.dtype or DTYPES:
            end_to_end(m3_sparse, dtype)


if __name__ == "__main__":
    main()
