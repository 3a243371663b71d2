"""The calls that agreement.py repeats on a GPU: small problems that reach every SM90 program.

Kinds of data, and with them what must agree:
  exact   the arithmetic of the whole call is exact, so all bits: bytes that are stored, products of small integers,
          the mean of a power of two of small integers
  dyadic  attention whose weights are powers of two: sums are exact, the division and the log-sum-exp are not
  normal  normally distributed values
"""

import dataclasses
import itertools
import math

import cases
import torch

BF16, FP16, FP32, E4M3, E5M2 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2
STORED, FUSED = 2, 3  # ways of select_blocks
UNION, BY_SEQUENCE, UNION_WIDENED = 1, 4, 5  # formulations of sparse_attention
CACHES = [(BF16, BF16), (FP16, FP16), (BF16, E4M3), (FP16, E4M3), (BF16, E5M2), (FP16, E5M2)]
ATTENTION_KINDS = ("exact", "dyadic", "normal")


def named(*dtypes):
    return "+".join(str(t)[6:].removesuffix("fn").replace("float8_", "") for t in dtypes)


def calls():
    """(name, kind, operator, arguments)"""
    yield from stores()
    yield from merges()
    yield from selections()
    yield from long_selections()
    yield from prefill_selections()
    yield from attentions()
    yield from choices()


def stores():
    for source, kept in [(BF16, BF16)] + [(x, y) for x in (BF16, FP16, FP32) for y in (E4M3, E5M2)]:
        generator = torch.Generator().manual_seed(1)
        k, v = ((torch.randn(37, 2, 128, generator=generator) * 40).to(source) for _ in range(2))
        k[3, 1, :4] = torch.tensor([torch.inf, -torch.inf, 1e30, -0.0]).to(source)
        caches = [torch.zeros(3, 2, 64, 128).to(kept) for _ in range(2)]
        slots = torch.randperm(192, generator=generator)[:37]
        scales = (torch.rand(2, generator=generator) + 0.1, torch.rand(1, generator=generator) + 0.1)
        scales = scales if source != kept else (None, None)
        yield f"store_kv {named(source, kept)}", "exact", "store_kv", [k, v, None, *caches, None, slots, *scales]


def merges():
    """Exact: two states of the same weight, and an empty one."""
    for source, kept in [(FP32, FP32), (FP32, BF16), (FP32, FP16), (BF16, BF16), (FP16, FP16)]:
        for kind in ("exact", "normal"):
            generator = torch.Generator().manual_seed(2)
            outs, lses = torch.randn(5, 7, 3, 128, generator=generator), torch.randn(5, 7, 3, generator=generator) * 8
            if kind == "exact":
                outs, lses = outs[:3].mul(4).round(), torch.full((3, 7, 3), 2.5)
                lses[1] = -torch.inf
            results = [cases.nan_like((7, 3, 128), kept), cases.nan_like((7, 3), FP32)]
            yield f"merge_states {named(source, kept)}", kind, "merge_states", [*results, outs.to(source), lses]


def with_rows(case, q_lens):
    """The same keys with the first queries alone."""
    tokens, offsets = sum(q_lens), [0, *itertools.accumulate(q_lens)]
    return dataclasses.replace(
        case, q=case.q[:tokens], index_q=case.index_q[:tokens], ids=case.ids[:tokens], q_lens=q_lens,
        cu_seqlens_q=torch.tensor(offsets, dtype=torch.int32),
    )  # fmt: skip


def selection(case, topk, with_scores, way):
    (query, keys, table), lengths = case.index()
    out = torch.full((*query.shape[:2], topk), 7, dtype=torch.int32)
    blocks = -(-table.shape[1] * keys.shape[1] // 128)
    scores = cases.nan_like((*query.shape[:2], blocks), FP32) if with_scores else None
    return [out, scores, query, keys, table, *lengths.values(), 1, 0, way]


def selections():
    for q, kv in CACHES[:4]:
        for kind, data in (("exact", "int"), ("normal", "normal")):
            case = cases.make([9, 8], [1500, 300], heads=(4, 4), dtype=q, kv_dtype=kv, kind=data, seed=3)
            for q_lens in ([1, 2], [3, 4], [9, 8]):  # of 4 heads: 8, 16 and 32 columns
                arguments = selection(with_rows(case, q_lens), 16, True, 0)
                yield f"select_blocks {named(q, kv)}", kind, "select_blocks", arguments


def long_selections():
    """More blocks than the narrow top-k takes, and than the wide one; many scores are equal."""
    for blocks in (300, 2100):
        case = cases.make([1], [700], heads=(4, 4), dtype=BF16, kind="int", poison="zero", seed=blocks)
        case.index_table = torch.arange(blocks, dtype=torch.int32)[None] % case.index_k_cache.shape[0]
        case.seqused_k = torch.tensor([blocks * 128 - 5], dtype=torch.int32)
        yield f"select_blocks, {blocks} blocks", "exact", "select_blocks", selection(case, 16, True, 0)


def prefill_selections():
    for q, kv in [*CACHES[:4], (E4M3, E4M3)]:
        for kind, data in (("exact", "int"), ("normal", "normal")):
            case = cases.make([70, 0, 33], [2900, 130, 700], heads=(4, 4), dtype=q, kv_dtype=kv, kind=data, seed=4)
            for way, topk in ((STORED, 16), (FUSED, 16), (FUSED, 20)):
                name = f"select_blocks {named(q, kv)} {'stored' if way == STORED else f'fused, {topk}'}"
                yield name, kind, "select_blocks", selection(case, topk, way == STORED, way)


def attention_case(kind, q_lens, kv_lens, dtypes, **options):
    """A case and its softmax scale. Where it is exact the ids are too, and lengths must be a power of two blocks."""
    q, kv = dtypes
    scales = "head" if kv.itemsize == 1 else None
    data = "normal" if kind == "normal" else "int"
    case = cases.make(
        q_lens,
        kv_lens,
        heads=(32, 2),
        dtype=q,
        kv_dtype=kv,
        scales=scales,
        kind=data,
        causal=kind != "exact",
        **options,
    )
    if kind == "normal":
        return case, 128**-0.5
    if scales:
        case.k_scale.fill_(1.0)
        case.v_scale.copy_(torch.tensor([0.5, 4.0]))
    # exact: all logits are 0. dyadic: a query is two of its elements, and with this scale a unit is a factor of 2.
    keep = torch.zeros(case.q.shape)
    if kind == "dyadic":
        where = torch.rand(case.q.shape, generator=cases.generator(5)).topk(2, -1).indices
        keep.scatter_(-1, where, 1.0)
    case.q.copy_((case.q.float().sign() * keep).to(q))
    return (powers_of_two(case) if kind == "exact" else case), math.log(2)


def powers_of_two(case):
    """Each row of ids takes 1, 2, 4, ... different whole blocks of its request: in any order, first those that stay in
    the first 4 ids."""
    generator = cases.generator(6)
    for row, kv_len, _ in case.rows():
        for head in range(case.ids.shape[1]):
            most = min(kv_len // 128, 4)
            count = 1 << (row + head) % most.bit_length()
            case.ids[row, head] = -1
            where = torch.randperm(4, generator=generator)[:count]
            case.ids[row, head, where] = torch.randperm(kv_len // 128, generator=generator)[:count].int()
    return case


def sparse(case, scale, causal, group=16, topk=16):
    """Arguments of sparse_attention up to the scales, with some of the query heads and ids."""
    (q, k_cache, v_cache, ids, table), options = case.sparse()
    q, ids = q[:, : 2 * group], ids[:, :, :topk]
    out, lse = cases.nan_like(q.shape, q.dtype), cases.nan_like(q.shape[:2], FP32)
    lengths = (options["cu_seqlens_q"], options["seqused_k"])
    return [out, lse, q, k_cache, v_cache, ids, table, *lengths, scale, causal, options["k_scale"], options["v_scale"]]


def attentions():
    for dtypes, kind in itertools.product(CACHES, ATTENTION_KINDS):
        lengths = [512, 256] if kind == "exact" else [600, 200]
        case, scale = attention_case(kind, [19, 5], lengths, dtypes, page=64, topk=20, seed=1)
        given = (case, scale, kind != "exact")
        for splits in (1, 2, 4, 16):
            yield f"decode {named(*dtypes)}", kind, "sparse_attention", [*sparse(*given), splits]
        for topk in (4, 16):
            arguments = [*sparse(*given, topk=topk), 0, True, UNION]
            yield f"prefill, union tiles {named(*dtypes)}", kind, "sparse_attention", arguments
            if dtypes[1] in (E4M3, E5M2):
                name, arguments = f"prefill, widened first {named(*dtypes)}", [*arguments[:-1], UNION_WIDENED]
                yield name, kind, "sparse_attention", arguments
        for group, topk in itertools.product((16, 8, 3), (4, 20)):
            name, operator = f"prefill, KV-stationary {named(*dtypes)}", "sparse_attention_kv_stationary"
            yield name, kind, operator, [*sparse(*given, group, topk), None, 8, 1]
        if dtypes[0] != dtypes[1]:
            continue
        for q_lens, splits in itertools.product(([1, 3], [19, 5]), (1, 3)):
            _, _, *rest = sparse(with_rows(case, q_lens), scale, kind != "exact", 8)
            del rest[3]  # the ids
            out = [cases.nan_like(rest[0].shape, dtypes[0]), cases.nan_like(rest[0].shape[:2], FP32)]
            yield f"dense {named(dtypes[0])}", kind, "dense_attention", [*out, *rest, splits]


def choices():
    """A request whose tokens agree on their blocks, and one whose tokens don't."""
    for kind in ATTENTION_KINDS[1:]:
        case, scale = attention_case(kind, [12, 9], [600, 2500], CACHES[0], topk=4, style="clean")
        for row, kv_len, _ in case.rows():
            agreed = torch.arange(4) if row < 12 else (torch.arange(4) * 3 + row) % ((kv_len - 9) // 128)
            case.ids[row] = agreed.int()
        arguments = [*sparse(case, scale, True), 0, True, BY_SEQUENCE]
        yield f"prefill, by request {named(*CACHES[0])}", kind, "sparse_attention", arguments
