"""Contiguous forms of a paged problem (cases.py): the same tokens in [B, Hkv, S, 128], poison wherever none is."""

import cases
import torch

LAYOUTS = ("HND", "NHD", "packed")


def buffers(layout, batch, heads, length, count, dtype):
    """`count` poisoned tensors [B, heads, S, 128]. HND ends with the last row's last slot, as a model's cache does."""
    if layout == "HND":
        return [cases.filled((batch, heads, length, cases.DIM), dtype, "nan") for _ in range(count)]
    if layout == "NHD":
        return [cases.filled((batch, length, heads, cases.DIM), dtype, "nan").transpose(1, 2) for _ in range(count)]
    both = cases.filled((batch, heads, length, cases.DIM * count), dtype, "nan")
    return [both[..., cases.DIM * i : cases.DIM * (i + 1)] for i in range(count)]


def tokens_of(cache, table, length, page):
    """[H, length, 128] of one request, out of its pages [P, H, page, 128]."""
    pages = cache[table[: -(-length // page)].long()]
    return pages.transpose(0, 1).flatten(1, 2)[:, :length]


def contiguous(case, spare, pads=None, layout="HND"):
    """(k, v, index_k, leftpad_k) of a case: the longest row with its padding leaves `spare` slots behind it."""
    pads = pads or [0] * len(case.kv_lens)
    length = max(n + p for n, p in zip(case.kv_lens, pads)) + spare
    batch, heads = len(case.kv_lens), case.k_cache.shape[1]
    k, v = buffers(layout, batch, heads, length, 2, case.k_cache.dtype)
    [index_k] = buffers("HND" if layout == "packed" else layout, batch, 1, length, 1, case.index_k_cache.dtype)
    for b, (n, pad) in enumerate(zip(case.kv_lens, pads)):
        for new, old, table in (
            (k, case.k_cache, case.block_table),
            (v, case.v_cache, case.block_table),
            (index_k, case.index_k_cache[:, None], case.index_table),
        ):
            new[b, :, pad : pad + n] = tokens_of(old, table[b], n, case.page)
    leftpad = torch.tensor(pads, dtype=torch.int32) if any(pads) else None
    return k, v, index_k[:, 0], leftpad
