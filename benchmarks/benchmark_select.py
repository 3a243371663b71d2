"""select_blocks (score + top-k) on one GPU: time a call and its share of the copy bandwidth.

    python benchmarks/benchmark_select.py --variant build/torch-stable-abi211-cu130-x86_64-linux [--results FILE]
    [--quick]

Decode and verify steps of uniform batches, pages of 128 tokens at random places of a pool that no two requests share,
top-k 16. "fp8": bf16 queries and e4m3 index keys. Bytes: every index key read once. FLOPs: 2 x 128 per (token, head,
key). Rows "select" time select_blocks, rows "score" block_scores alone. Protocol: protocol.py. Every shape's answer is
checked first: scores of some rows against float32 torch, the selection exactly against the scores.
"""

import argparse
from pathlib import Path

import protocol
import torch

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


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variant", required=True)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--quick", action="store_true", help="the three shapes of the targets")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    m3_sparse = protocol.load(options.variant)
    torch.manual_seed(0)
    bandwidth = protocol.copy_bandwidth()
    rows = []
    for dtype in ("bf16", "fp8"):
        for batch, kv_len, q_len, heads in QUICK if options.quick else CASES:
            sets, lengths, size = make_sets(batch, kv_len, q_len, heads, dtype)
            flops = 256 * batch * q_len * heads * kv_len
            key = {"dtype": dtype, "heads": str(heads), "batch": batch, "q_len": q_len, "kv_len": kv_len, "page": PAGE}
            with m3_sparse.backend("aot"):
                check(m3_sparse, sets[0], lengths)
                for op, function in (("select", m3_sparse.select_blocks), ("score", m3_sparse.block_scores)):
                    cold, warm = protocol.cold_and_warm(lambda q, k, t: function(q, k, t, **lengths), sets)
                    rows.append(protocol.row(bandwidth, cold, warm, size, flops, op=op, impl="ours", **key))
            del sets
            torch.cuda.empty_cache()
    if options.results:
        protocol.merge_rows(options.results, [r for r in rows if r["op"] == "select"])
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {bandwidth:.0f} GB/s")
    protocol.print_table(rows, ("op", "dtype", "heads", "batch", "q_len", "kv_len"), bandwidth)


if __name__ == "__main__":
    main()
