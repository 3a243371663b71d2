"""Decode one long context on several GPUs: K, V and index keys are split by pages, results equal those of one GPU.

    torchrun --nproc-per-node 2 examples/context_parallel_decode.py                    # on the CPU, over gloo
    torchrun --nproc-per-node 2 examples/context_parallel_decode.py --device cuda --tokens 131072

Page j of a request (128 tokens, one block) lies on rank j % ranks, as that rank's page j // ranks: whatever the length,
every rank has the same share of it to within a page. A step of one layer:

1. store: the rank that owns the new token's page writes it; the others get slot -1, which is skipped.
2. select: each rank scores its own blocks and takes its own best 16; all ranks exchange these candidates (16 scores and
   ids a row and head, whatever the context) and each finds the best 16 of all.
3. attend: each rank attends to those of the 16 that it holds, in its own numbering.
4. merge: outputs and log-sum-exps are exchanged and combined with `merge_states`.

Exact by the rules of selection: higher score first, the lower id among equal ones, the newest block always. A block that
is among the best 16 of all is among the best 16 of its rank.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from kernels import get_local_kernel

BUILD = Path(__file__).resolve().parent.parent / "build"
VARIANTS = {"cpu": "torch-cpu", "cuda": "torch-stable-abi211-cu130-x86_64-linux"}
BLOCK, TOPK, DIM = 128, 16, 128
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # renamed in torch 2.13
LAST = torch.iinfo(torch.int32).max  # sorts behind every id
NONE = torch.iinfo(torch.int64).min  # sorts behind every key of a candidate


class Cache:
    """Pages of one layer, whole (ranks = 1) or one rank's share of every request."""

    def __init__(self, m3_sparse, requests, most_tokens, kv_heads, rank, ranks, dtype, device):
        self.kernels, self.rank, self.ranks = m3_sparse, rank, ranks
        blocks = -(-most_tokens // BLOCK)
        width = -(-blocks // ranks)
        pages = requests * width
        self.k = torch.zeros(pages, kv_heads, BLOCK, DIM, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)
        self.index_k = torch.zeros(pages, BLOCK, DIM, dtype=dtype, device=device)
        self.table = torch.randperm(pages, device=device).to(torch.int32).view(requests, width)

    def lengths(self, positions):
        """How many of the tokens 0 .. position this rank holds. They are the first ones of its own sequence."""
        block, offset = positions // BLOCK, positions % BLOCK
        before = (block - self.rank + self.ranks - 1) // self.ranks  # own pages ahead of the row's own block
        return before * BLOCK + torch.where(block % self.ranks == self.rank, offset + 1, 0)

    def store(self, k, v, index_k, requests, positions):
        """Tokens [T, heads, 128] of these requests at these positions."""
        block = positions // BLOCK
        page = self.table[requests, (block // self.ranks).clamp(max=self.table.shape[1] - 1)].long()
        slots = torch.where(block % self.ranks == self.rank, page * BLOCK + positions % BLOCK, -1)
        self.kernels.store_kv(k, v, index_k, self.k, self.v, self.index_k, slots)

    def rows(self, requests, positions):
        """Every query row as a request of its own: then draft tokens, too, see the right part of each rank's tokens."""
        count = torch.arange(len(requests) + 1, dtype=torch.int32, device=positions.device)
        return self.table[requests], {"cu_seqlens_q": count, "seqused_k": self.lengths(positions).to(torch.int32)}


def gather(x, ranks):
    """x of every rank, [ranks, *x.shape]."""
    out = x.new_empty(ranks * x.shape[0], *x.shape[1:])
    all_gather(out, x.contiguous())
    return out.view(ranks, *x.shape)


def best_of_all(ids, scores, newest, topk=TOPK):
    """The selection from candidates of all ranks: ids [T, H, n] in the request's numbering, -1 for none; newest [T].

    int32 [T, H, topk] as select_blocks has it: ascending, then -1.
    """
    newest = newest.to(torch.int32).view(-1, 1, 1).expand(-1, ids.shape[1], 1)
    # One integer that orders as the rules do: the score's bits, those of negative ones mirrored, above the mirrored id.
    # Adding 0.0 turns -0.0 into 0.0.
    bits = (scores + 0.0).view(torch.int32)
    key = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() * 2**32 + (LAST - ids)
    key = torch.where((ids < 0) | (ids == newest), NONE, key)
    best = key.topk(min(topk - 1, key.shape[-1]), -1).values
    others = torch.where(best == NONE, LAST, LAST - (best & 0xFFFFFFFF)).to(torch.int32)
    chosen = torch.cat([newest, others], -1).sort(dim=-1).values
    chosen = torch.where(chosen == LAST, -1, chosen)
    return torch.nn.functional.pad(chosen, (0, topk - chosen.shape[-1]), value=-1)


def candidates(cache, index_q, requests, positions):
    """This rank's best blocks, [T, H, topk] ids in the request's numbering (-1 for none) and scores."""
    table, lengths = cache.rows(requests, positions)
    own, scores = cache.kernels.select_blocks(
        index_q, cache.index_k, table, topk=TOPK, local_blocks=0, return_scores=True, **lengths
    )
    ids = torch.where(own < 0, -1, own * cache.ranks + cache.rank)
    return ids, scores.gather(-1, own.clamp(min=0).long())


def select(cache, index_q, requests, positions):
    ids, scores = candidates(cache, index_q, requests, positions)
    # One exchange for both: the scores travel as the integers that have their bits.
    both = gather(torch.stack([ids, scores.view(torch.int32)], -1), cache.ranks)
    both = both.permute(1, 2, 0, 3, 4).flatten(2, 3)  # [T, H, ranks * topk, 2]
    return best_of_all(both[..., 0], both[..., 1].contiguous().view(torch.float32), positions // BLOCK)


def attend(cache, q, ids, requests, positions):
    table, lengths = cache.rows(requests, positions)
    mine = torch.where((ids >= 0) & (ids % cache.ranks == cache.rank), ids // cache.ranks, -1)
    # A rank without any of a row's blocks returns output 0 and log-sum-exp -inf, which the merge leaves out.
    out, lse = cache.kernels.sparse_attention(q, cache.k, cache.v, mine, table, return_lse=True, **lengths)
    return cache.kernels.merge_states(gather(out, cache.ranks), gather(lse, cache.ranks))[0]


def on_ranks(cache, q, index_q, requests, positions):
    ids = select(cache, index_q, requests, positions)
    return ids, attend(cache, q, ids, requests, positions)


def on_one(cache, q, index_q, requests, positions):
    """The same with the whole cache: what the ranks have to arrive at."""
    table, lengths = cache.rows(requests, positions)
    ids = cache.kernels.select_blocks(index_q, cache.index_k, table, topk=TOPK, **lengths)
    return ids, cache.kernels.sparse_attention(q, cache.k, cache.v, ids, table, **lengths)


def run(options, device, rank, ranks):
    m3_sparse = get_local_kernel(options.variant or BUILD / VARIANTS[options.device], backend=options.device)
    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    heads, kv_heads, batch = options.heads, options.kv_heads, options.requests
    torch.manual_seed(0)  # the same tokens on every rank
    room = options.tokens + options.steps * options.drafts
    share = Cache(m3_sparse, batch, room, kv_heads, rank, ranks, dtype, device)
    whole = Cache(m3_sparse, batch, room, kv_heads, 0, 1, dtype, device)

    def tokens(count, width):
        return torch.randn(count, width, DIM, device=device).to(dtype)

    def store(requests, positions):
        k, v, index_k = tokens(len(requests), kv_heads), tokens(len(requests), kv_heads), tokens(len(requests), 1)[:, 0]
        for cache in (share, whole):
            cache.store(k, v, index_k, requests, positions)

    # Prompts of different lengths, one of them shorter than a page.
    prompts = [max(1, options.tokens * (i + 1) // batch - 37 * i) for i in range(batch - 1)] + [options.tokens]
    prompts[0] = min(prompts[0], 100) if batch > 1 else prompts[0]
    for i, length in enumerate(prompts):
        for first in range(0, length, 16384):
            positions = torch.arange(first, min(first + 16384, length), device=device)
            store(torch.full_like(positions, i), positions)

    requests = torch.arange(batch, device=device).repeat_interleave(options.drafts)
    ends = torch.tensor(prompts, device=device).repeat_interleave(options.drafts)
    draft = torch.arange(options.drafts, device=device).repeat(batch)
    largest = 0.0
    for step in range(options.steps):
        positions = ends + step * options.drafts + draft
        store(requests, positions)
        q, index_q = tokens(len(requests), heads), tokens(len(requests), kv_heads)
        rows = (requests, positions)
        ids, out = on_ranks(share, q, index_q, *rows)
        want_ids, want = on_one(whole, q, index_q, *rows)
        if not torch.equal(ids, want_ids):
            raise SystemExit(f"step {step}: the ranks chose other blocks than one process")
        largest = max(largest, (out - want).abs().max().item())
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    if not largest < tolerance:
        raise SystemExit(f"outputs differ from those of one process by {largest:.1e}, more than {tolerance:.0e}")
    if options.device == "cuda":
        times = [
            graph_ms(lambda: on_ranks(share, q, index_q, *rows)),
            graph_ms(lambda: on_one(whole, q, index_q, *rows)),
        ]
    if rank == 0:
        print(
            f"{ranks} ranks, {batch} requests of up to {options.tokens:,} tokens, {options.steps} steps of {options.drafts} "
            f"tokens: same blocks as one, outputs within {largest:.1e}; pages here {share.k.shape[0]} of {whole.k.shape[0]}"
        )
        if options.device == "cuda":
            print(f"a step of one layer, as a CUDA graph: {times[0]:.3f} ms, on one GPU {times[1]:.3f} ms")


def graph_ms(step, replays=20):
    """Milliseconds of a step, launched as a CUDA graph; the collectives are part of it."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    graph.replay()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / replays


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--variant", type=Path, help="the built variant (default: the one in build/)")
    parser.add_argument("--requests", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=6000, help="of the longest request")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--drafts", type=int, default=2, help="tokens of a request in one step, as in verification")
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--kv-heads", type=int, default=4)
    options = parser.parse_args()
    cuda = options.device == "cuda"
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    run(options, device, dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
