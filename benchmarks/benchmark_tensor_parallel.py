"""Selection and attention of one MiniMax-M3 layer on one GPU and on several, heads divided among them.

    torchrun --nproc-per-node 2 benchmarks/benchmark_tensor_parallel.py --variant build/torch-stable-abi211-cu130-x86_64-linux
        [--results FILE] [--cases 32768:1 131072:64 32768:prefill ...] [--device cpu]

Every rank builds the whole problem (64/4 heads, 4 index heads, bf16, pages of 128 at random places), runs it alone, then
its share, and compares: selections must be equal, outputs too up to rounding. `by head`: a rank has its KV heads, their
query heads and index heads, and its own caches of K and V; index keys are one head, which every rank holds and scans.
`by request`, decode only: a rank selects for all heads of its part of the requests, then the ids are exchanged by one
all-gather; attention stays by head. `o_proj` is the all-reduce that tensor parallelism adds to every layer, by head or
not, for a hidden size of 6144.
Decode: a CUDA graph of steps, with the all-gather, over inputs that exceed twice the L2. Prefill: events around the two
calls. A case is the slowest rank's median. On the CPU: wall clock, gloo, small problems; its times mean nothing.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent))

import itertools

import definitions
import protocol

DIM, BLOCK, TOPK, HEADS, KV_HEADS, HIDDEN = 128, 128, 16, 64, 4, 6144
CASES = ("32768:prefill", "131072:prefill", "32768:1", "32768:16", "32768:64", "131072:1", "131072:16", "131072:64")
SMALL_CASES = ("256:prefill", "4096:4")
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # renamed in torch 2.13
GRAPH_STEPS, REPLAYS, REPEATS = 16, 25, 11


class Problem:
    """Inputs of one or more calls of a layer that exceed the L2 together; `share` makes a rank's part of it."""

    def __init__(self, kv_len, batch, q_len, device, sets):
        self.kv_len, self.batch, self.q_len = kv_len, batch, q_len
        self.heads, self.kv_heads = HEADS, KV_HEADS
        torch.manual_seed(kv_len + batch)
        options = {"dtype": torch.bfloat16, "device": device}
        width = kv_len // BLOCK
        pages, rows = sets * batch * width, batch * q_len
        self.k, self.v = (fill(torch.empty(pages, KV_HEADS, BLOCK, DIM, **options)) for _ in range(2))
        self.index_k = fill(torch.empty(pages, BLOCK, DIM, **options))
        self.q = [torch.randn(rows, HEADS, DIM, **options) for _ in range(sets)]
        self.index_q = [torch.randn(rows, KV_HEADS, DIM, **options) for _ in range(sets)]
        # Drawn on the CPU: every rank must have the same pages.
        self.tables = torch.randperm(pages).to(torch.int32).view(sets, batch, width).to(device)
        self.lengths = {
            "cu_seqlens_q": torch.arange(batch + 1, dtype=torch.int32, device=device) * q_len,
            "seqused_k": torch.full((batch,), kv_len, dtype=torch.int32, device=device),
        }

    def share(self, rank, ranks):
        part = Problem.__new__(Problem)
        part.__dict__.update(self.__dict__)
        part.heads, part.kv_heads = HEADS // ranks, KV_HEADS // ranks
        first = rank * part.kv_heads
        part.mine = slice(first, first + part.kv_heads)
        queries = slice(rank * part.heads, (rank + 1) * part.heads)
        part.k, part.v = self.k[:, part.mine].contiguous(), self.v[:, part.mine].contiguous()
        part.q = [q[:, queries].contiguous() for q in self.q]
        part.all_index_q = self.index_q
        part.index_q = [q[:, part.mine].contiguous() for q in self.index_q]
        return part

    def bytes(self, requests=None):
        """Of a decode step: index keys of the scanned requests, chosen K and V, queries and outputs, read once."""
        scanned = (requests or self.batch) * self.kv_len
        chosen = self.batch * self.kv_heads * min(TOPK, self.kv_len // BLOCK) * BLOCK * 2
        return 2 * DIM * (scanned + chosen + 2 * self.batch * self.q_len * self.heads)


def fill(cache):
    """Random numbers, repeated: drawing all of them would take longer than the measurement."""
    flat = cache.view(-1)
    seed = torch.randn(min(flat.numel(), (1 << 22) + 1024), dtype=cache.dtype, device=cache.device)
    for part in flat.split(seed.numel()):
        part.copy_(seed[: part.numel()])
    return cache


class Layer:
    """The two calls, by head."""

    def __init__(self, m3_sparse, problem):
        self.kernels, self.problem = m3_sparse, problem

    def select(self, i):
        p = self.problem
        return self.kernels.select_blocks(p.index_q[i], p.index_k, p.tables[i], topk=TOPK, **p.lengths)

    def attend(self, i, ids):
        p = self.problem
        return self.kernels.sparse_attention(p.q[i], p.k, p.v, ids, p.tables[i], **p.lengths)


class LayerByRequest(Layer):
    """Selection for all heads of this rank's requests, the ids exchanged; attention by head."""

    def __init__(self, m3_sparse, problem, rank, ranks):
        super().__init__(m3_sparse, problem)
        self.rows = slice(rank * problem.batch // ranks, (rank + 1) * problem.batch // ranks)
        self.part = {
            "cu_seqlens_q": problem.lengths["cu_seqlens_q"][: self.rows.stop - self.rows.start + 1],
            "seqused_k": problem.lengths["seqused_k"][self.rows],
        }
        self.ids = torch.empty(problem.batch, KV_HEADS, TOPK, dtype=torch.int32, device=problem.k.device)

    def select(self, i):
        p, rows = self.problem, self.rows
        arguments = (p.all_index_q[i][rows], p.index_k, p.tables[i][rows])
        all_gather(self.ids, self.kernels.select_blocks(*arguments, topk=TOPK, **self.part))
        return self.ids[:, p.mine]


# ---- timing: the same number of calls on every rank, whatever a rank measures, since some of them communicate


def graph_microseconds(step, sets, device):
    """Median over replays, a step."""
    order = [i % sets for i in range(max(sets, GRAPH_STEPS))]
    step(0)
    if device == "cpu":
        start = time.perf_counter()
        step(0)
        return (time.perf_counter() - start) * 1e6
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for i in order:
            step(i)
    times = []
    for _ in range(REPLAYS + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(order))
    return statistics.median(times[3:])


def measure(layer, sets, device):
    """Microseconds of select, attend and both."""
    p = layer.problem
    if p.q_len == 1:
        ids = layer.select(0).clone()
        steps = (layer.select, lambda i: layer.attend(i, ids), lambda i: layer.attend(i, layer.select(i)))
        return [graph_microseconds(step, sets, device) for step in steps]
    times = []
    for _ in range(REPEATS):
        marks = [mark(device)]
        ids = layer.select(0)
        marks.append(mark(device))
        layer.attend(0, ids)
        marks.append(mark(device))
        if device == "cuda":
            torch.cuda.synchronize()
        times.append([between(a, b) for a, b in itertools.pairwise(marks)])
    select, attend = (statistics.median(t[i] for t in times[1:]) for i in range(2))
    return [select, attend, select + attend]


def mark(device):
    if device == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(a, b):
    return (b - a) * 1e6 if isinstance(a, float) else a.elapsed_time(b) * 1000


def slowest(times, device):
    """Element-wise maximum over the ranks."""
    tensor = torch.tensor(times, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.tolist()


# ---- one case


def compare(whole_ids, whole_out, layer, name):
    """A rank's selection and output against the same heads of the whole problem; whether the bits are equal."""
    p = layer.problem
    ids = layer.select(0)
    if not torch.equal(ids, whole_ids[:, p.mine]):
        raise SystemExit(f"{name}: a rank selects other blocks than one GPU")
    out = layer.attend(0, ids)
    heads = p.heads // p.kv_heads
    want = whole_out[:, p.mine.start * heads : p.mine.stop * heads]
    if not torch.allclose(out, want, rtol=2e-2, atol=2e-2):
        raise SystemExit(f"{name}: a rank's output differs from one GPU's by {(out - want).abs().max():.1e}")
    return torch.equal(out, want)


def run_case(m3_sparse, case, rank, ranks, device, bandwidth):
    """The result rows of one case; all ranks make them, the first one prints."""
    length, kind = case.split(":")
    kv_len, prefill = int(length), kind == "prefill"
    batch, q_len = (1, kv_len) if prefill else (int(kind), 1)
    sets = 1 if prefill else min(8, -(-protocol.COLD_BYTES // (batch * kv_len * DIM * 2)))
    problem = Problem(kv_len, batch, q_len, device, sets)
    whole = Layer(m3_sparse, problem)
    ids = whole.select(0)
    out = whole.attend(0, ids)
    one = measure(whole, sets, device)
    share = problem.share(rank, ranks)
    layers = {"by head": Layer(m3_sparse, share)}
    if not prefill and batch % ranks == 0:
        layers["by request"] = LayerByRequest(m3_sparse, share, rank, ranks)
    name = f"{kv_len} {'prefill' if prefill else f'decode B={batch}'}"
    equal = [compare(ids, out, layer, name) for layer in layers.values()]
    one = slowest(one, device)
    found = [(f"{ranks} GPUs, {how}", slowest(measure(layer, sets, device), device)) for how, layer in layers.items()]
    hidden = torch.randn(batch * q_len, HIDDEN, device=device).bfloat16()
    reduce = [graph_microseconds(lambda i: dist.all_reduce(hidden), 1, device)] if not prefill else None
    if rank == 0:
        bits = "same bits" if all(equal) else "equal to rounding"
        print(f"{name} | 1 GPU | {one[0]:.1f} | {one[1]:.1f} | {one[2]:.1f} |  | ", flush=True)
        for how, times in found:
            print(f"{name} | {how} | {times[0]:.1f} | {times[1]:.1f} | {times[2]:.1f} | {one[2] / times[2]:.2f} | {bits}",
                  flush=True)  # fmt: skip
        if reduce:
            print(f"{name} | o_proj's all-reduce |  |  | {reduce[0]:.1f} |  | ", flush=True)
    if bandwidth is None:
        return []
    rows = []
    for how, times in [("1 GPU", one), *found]:
        owner = problem if how == "1 GPU" else share
        size = 0 if prefill else owner.bytes(batch // ranks if how.endswith("request") else None)
        key = {"op": "tensor_parallel", "impl": f"ours, {how}", "dtype": "bf16", "heads": "64/4", "batch": batch}
        key |= {"q_len": q_len, "kv_len": kv_len, "selection": "indexer", "page": BLOCK}
        rows.append(protocol.row(bandwidth, times[2], times[2], size, 0, **key))
    return rows


class HeadsOfTwoRanks(protocol.Benchmark):
    """A decode step of 4 requests at 4,096 tokens, the heads of two ranks one after the other, against all at once."""

    seed = 0
    key: ClassVar[dict] = {
        "op": "tensor_parallel",
        "dtype": "bf16",
        "heads": f"{HEADS}/{KV_HEADS}",
        "batch": 4,
        "q_len": 1,
    }
    key.update(kv_len=4096, selection="indexer", page=BLOCK)

    def work(self):
        return self.problem.bytes(), 4 * DIM * (2 * KV_HEADS * 4096 + 4 * HEADS * TOPK * BLOCK)

    def setup(self) -> None:
        self.problem = Problem(4096, 4, 1, self.device, 1)
        self.layers = [Layer(self.kernel, self.problem.share(rank, 2)) for rank in range(2)]

    def benchmark_heads(self) -> None:
        self.out = torch.cat([layer.attend(0, layer.select(0)) for layer in self.layers], 1)

    def verify_heads(self) -> torch.Tensor:
        p = self.problem
        ids = definitions.selection(p.index_q[0], p.index_k, p.tables[0], TOPK)
        return definitions.attention(p.q[0], p.k, p.v, p.tables[0], ids)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variant", required=True)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--cases", nargs="+", help="kv_len:batch (decode) or kv_len:prefill")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args()
    cuda = options.device == "cuda"
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else None
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    m3_sparse = protocol.load(options.variant)
    bandwidth = protocol.copy_bandwidth() if cuda else None
    if rank == 0:
        where = f"{torch.cuda.get_device_name()}, copy {bandwidth:.0f} GB/s" if cuda else "CPU"
        print(f"{ranks} ranks, torch {torch.__version__}, {where}; times in us")
        print("case | on | select | attend | both | times faster | against 1 GPU", flush=True)
    rows, start = [], time.time()
    for case in options.cases or (CASES if cuda else SMALL_CASES):
        rows += run_case(m3_sparse, case, rank, ranks, options.device, bandwidth)
        if cuda:
            torch.cuda.empty_cache()
    if rank == 0:
        print(f"{time.time() - start:.0f} s")
        if options.results and rows:
            protocol.merge_rows(options.results, rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
