"""Builders of paged problems with everything hostile that the contract allows.

A `Case` is drawn from its seed alone: the same seed gives the same token data whatever the layout, page size, poison or
dtype of the caches, so that two layouts of one problem can be compared. All bytes that hold no visible token (unused
pages, the rest of a last page, gaps between strided pages, left pads) are poison.
"""

import dataclasses

import torch

BLOCK = 128
DIM = 128
LAYOUTS = ("hnd", "nhd", "packed", "padded", "dense")
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# What may stand in a page table past a request's last page: never to be read, so nothing there may matter.
GARBAGE = (-1, -(2**31), 2**31 - 1, -7, 1 << 20)


@dataclasses.dataclass
class Case:
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    index_q: torch.Tensor
    index_k_cache: torch.Tensor
    index_table: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seqused_k: torch.Tensor
    ids: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    q_lens: list
    kv_lens: list
    page: int

    def lengths(self):
        return {"cu_seqlens_q": self.cu_seqlens_q, "seqused_k": self.seqused_k}

    def scales(self):
        return {"k_scale": self.k_scale, "v_scale": self.v_scale}

    def sparse(self, ids=None):
        """Positional and keyword arguments of sparse_attention."""
        args = (self.q, self.k_cache, self.v_cache, self.ids if ids is None else ids, self.block_table)
        return args, {**self.lengths(), **self.scales()}

    def dense(self):
        return (self.q, self.k_cache, self.v_cache, self.block_table), {**self.lengths(), **self.scales()}

    def index(self):
        """Positional and keyword arguments of select_blocks and block_scores."""
        return (self.index_q, self.index_k_cache, self.index_table), self.lengths()

    def rows(self):
        """(row, kv_len, qpos) of every real row."""
        row = 0
        for q_len, kv_len in zip(self.q_lens, self.kv_lens):
            for i in range(q_len):
                yield row, kv_len, kv_len - q_len + i
                row += 1


def generator(seed):
    return torch.Generator().manual_seed(seed)


def values(shape, kind, dtype, gen):
    """Random data: "normal", or "int" whose dot products are exact in fp32 (and so are ties between them)."""
    if kind == "normal":
        data = torch.randn(shape, generator=gen)
    else:
        data = torch.randint(-3, 4, shape, generator=gen).float()
    return data.to(dtype)


def filled(shape, dtype, poison):
    """A tensor of the given poison: "nan", "zero", "inf" (the largest value where the format has no infinity) or "ones"
    (all bits one: another NaN).
    """
    if poison == "ones":
        return torch.full((*shape[:-1], shape[-1] * dtype.itemsize), 0xFF, dtype=torch.uint8).view(dtype)
    if dtype in FP8:
        byte = {"nan": 127, "zero": 0, "inf": 124 if dtype == torch.float8_e5m2 else 126}[poison]
        return torch.full(shape, byte, dtype=torch.uint8).view(dtype)
    return torch.full(shape, {"nan": float("nan"), "zero": 0.0, "inf": float("inf")}[poison], dtype=dtype)


def empty_pages(layout, count, heads, page, caches, dtype, poison):
    """`caches` views [count, heads, page, 128] over poisoned memory in the given layout."""
    if layout == "hnd":
        return [filled((count, heads, page, DIM), dtype, poison) for _ in range(caches)]
    if layout == "nhd":
        return [filled((count, page, heads, DIM), dtype, poison).transpose(1, 2) for _ in range(caches)]
    if layout == "packed":
        both = filled((count, heads, page, DIM * caches), dtype, poison)
        return [both[..., DIM * i : DIM * (i + 1)] for i in range(caches)]
    if layout == "padded":
        size = heads * page * DIM
        gap = 48  # 48 elements are a multiple of 16 bytes in every dtype and of nothing larger than 48 bytes in fp8
        flat = [filled((count * (size + gap),), dtype, poison) for _ in range(caches)]
        return [f.as_strided((count, heads, page, DIM), (size + gap, page * DIM, DIM, 1)) for f in flat]
    raise ValueError(layout)


def widen_table(table, gen, spare_columns):
    """The table with garbage columns after it, as a view whose row stride exceeds its width."""
    rows, width = table.shape
    pick = torch.randint(0, len(GARBAGE), (rows, width + spare_columns + 3), generator=gen)
    wide = torch.tensor(GARBAGE, dtype=torch.int64)[pick].to(torch.int32)
    used = table >= 0
    wide[:, :width][used] = table[used]
    return wide[:, : width + spare_columns]


def place(tokens, page, layout, dtype, poison, gen, spare_pages=2, spare_columns=2):
    """Put tokens (per cache: per request [kv_len, H, 128]) into pages. Returns (caches [P,H,page,128], block_table)."""
    kv_lens = [len(t) for t in tokens[0]]
    heads = tokens[0][0].shape[1]
    need = [-(-n // page) for n in kv_lens]
    table = torch.full((len(need), max(need + [1])), -1, dtype=torch.int32)
    if (
        layout == "dense"
    ):  # [B,H,S,128] read as overlapping pages whose stride is one token; left pads live in the table
        pads = [(37 * b + 5) % 61 for b in range(len(need))]
        width = max(p + n * page for p, n in zip(pads, need)) + page
        count = len(need) * heads * width - (heads - 1) * width - (page - 1)
        views = []
        for per_request in tokens:
            buffer = filled((len(need), heads, width, DIM), dtype, poison)
            for b, data in enumerate(per_request):
                buffer[b, :, pads[b] : pads[b] + len(data)] = data.transpose(0, 1).to(dtype)
            views.append(buffer.as_strided((count, heads, page, DIM), (DIM, width * DIM, DIM, 1)))
        for b, n in enumerate(need):
            for j in range(n):
                table[b, j] = b * heads * width + pads[b] + j * page
        return views, widen_table(table, gen, spare_columns)
    count = sum(need) + spare_pages
    order = torch.randperm(count, generator=gen).tolist()
    views = empty_pages(layout, count, heads, page, len(tokens), dtype, poison)
    for b, n in enumerate(need):
        for j in range(n):
            number = table[b, j] = order.pop()
            for view, per_request in zip(views, tokens):
                data = per_request[b][j * page : (j + 1) * page].transpose(0, 1)
                view[number, :, : data.shape[1]] = data.to(dtype)
    return views, widen_table(table, gen, spare_columns)


def random_ids(total_q, rows, heads, topk, style, causal, gen):
    """int32 [T, H, topk]. "clean": ascending, then -1. "wild": any order, -1 anywhere, duplicates, ids out of range."""
    ids = torch.full((total_q, heads, topk), -1, dtype=torch.int32)
    wild = (-1, -1, -5, -(2**31), 2**31 - 1, 1 << 24, 4096)
    for row, kv_len, qpos in rows:
        n = max(0, qpos // BLOCK + 1) if causal else -(-kv_len // BLOCK)
        for head in range(heads):
            most = min(n, topk)
            size = int(torch.randint(0 if style == "wild" else min(1, most), most + 1, (), generator=gen))
            chosen = torch.randperm(max(n, 1), generator=gen)[:size].tolist()
            if style == "clean":
                slots = sorted(chosen)
            else:
                slots = list(chosen)
                while len(slots) < topk:
                    kind = int(torch.randint(0, 4, (), generator=gen))
                    if kind == 0 and chosen:
                        slots.append(chosen[int(torch.randint(0, len(chosen), (), generator=gen))])
                    elif kind == 1:
                        slots.append(
                            max(n, 0) + int(torch.randint(0, 3, (), generator=gen))
                        )  # just past the candidates
                    else:
                        slots.append(wild[int(torch.randint(0, len(wild), (), generator=gen))])
                slots = [slots[i] for i in torch.randperm(topk, generator=gen).tolist()]
            ids[row, head, : len(slots)] = torch.tensor(slots, dtype=torch.int32)
    return ids


def make(
    q_lens,
    kv_lens,
    *,
    heads=(8, 2),
    page=128,
    dtype=torch.float32,
    kv_dtype=None,
    layout="hnd",
    index_layout=None,
    poison="nan",
    kind="normal",
    topk=16,
    style="wild",
    causal=True,
    pad_rows=0,
    scales=None,
    seed=0,
    offsets=torch.int32,
):
    """A Case. `scales`: None, "scalar" or "head" (k_scale and v_scale). `pad_rows`: rows past cu_seqlens_q[B]."""
    q_heads, kv_heads = heads
    kv_dtype = kv_dtype or dtype
    data, where = generator(seed), generator(seed + 1000003)
    total_q = sum(q_lens) + pad_rows
    keys = [values((n, kv_heads, DIM), kind, torch.float32, data) for n in kv_lens]
    vals = [values((n, kv_heads, DIM), kind, torch.float32, data) for n in kv_lens]
    index_keys = [values((n, 1, DIM), kind, torch.float32, data) for n in kv_lens]
    q = values((total_q, q_heads, DIM), kind, dtype, data)
    index_q = values((total_q, kv_heads, DIM), kind, dtype, data)
    if pad_rows:
        q[-pad_rows:], index_q[-pad_rows:] = float("nan"), float("nan")
    (k_cache, v_cache), table = place([keys, vals], page, layout, kv_dtype, poison, where)
    index_layout = index_layout or (layout if layout in ("hnd", "padded", "dense") else "padded")
    (index_cache,), index_table = place([index_keys], page, index_layout, kv_dtype, poison, where)
    cu = torch.tensor([0] + q_lens).cumsum(0).to(offsets)
    case = Case(
        q,
        k_cache,
        v_cache,
        table,
        index_q,
        index_cache[:, 0],
        index_table,
        cu,
        torch.tensor(kv_lens, dtype=offsets),
        None,
        None,
        None,
        list(q_lens),
        list(kv_lens),
        page,
    )
    case.ids = random_ids(total_q, case.rows(), kv_heads, topk, style, causal, where)
    if pad_rows:
        case.ids[-pad_rows:] = 0
    if scales:
        count = 1 if scales == "scalar" else kv_heads
        case.k_scale = 0.25 + torch.rand(count, generator=where)
        case.v_scale = 0.5 + 3 * torch.rand(count, generator=where)
    return case


def head_major(ids):
    """The same ids as the transposed view of a [H, T, K] tensor."""
    return ids.transpose(0, 1).contiguous().transpose(0, 1)


def unaligned(ids):
    """The same ids in a slice whose base is 4 bytes past a 16-byte boundary, out of a wider buffer."""
    rows, heads, topk = ids.shape
    buffer = torch.full((rows, heads, topk + 5), 12345, dtype=ids.dtype)
    view = buffer[:, :, 1 : topk + 1]
    view.copy_(ids)
    return view


def canonical(case, ids, causal=True):
    """The ids that count, once each: ascending, then -1."""
    out = torch.full_like(ids, -1)
    for row, kv_len, qpos in case.rows():
        end = qpos + 1 if causal else kv_len
        for head in range(ids.shape[1]):
            good = sorted({b for b in ids[row, head].tolist() if 0 <= b * BLOCK < end})
            out[row, head, : len(good)] = torch.tensor(good, dtype=torch.int32)
    return out


def poison_unselected(case, ids):
    """NaN in every block of K and V that no row of its request selects (pages must not be shared or overlap)."""
    row = 0
    for b, (q_len, kv_len) in enumerate(zip(case.q_lens, case.kv_lens)):
        for head in range(case.k_cache.shape[1]):
            used = set(ids[row : row + q_len, head].flatten().tolist())
            for first in range(0, kv_len, case.page):
                if first // BLOCK not in used:
                    page = int(case.block_table[b, first // case.page])
                    for cache in (case.k_cache, case.v_cache):
                        cache[page, head] = filled((case.page, DIM), cache.dtype, "nan")
        row += q_len


WILD = (-(2**31), -1, 0, 5, 2**30, 2**31 - 1)


def spoil(gen, *tensors):
    """Puts numbers that mean nothing into 40 % of the entries of lengths, offsets, pages or ids."""
    wild = torch.tensor(WILD, dtype=torch.int32)
    for tensor in tensors:
        at = torch.rand(tensor.shape, generator=gen) < 0.4
        tensor[at] = wild[torch.randint(0, len(wild), tensor.shape, generator=gen)][at]


def nan_like(shape, dtype):
    """An output buffer that shows every row left unwritten."""
    return torch.full(shape, float("nan"), dtype=dtype)


def call_sparse(function, case, ids=None, **more):
    """sparse_attention with poisoned out= and lse=; returns (out, lse), which must be the given buffers."""
    args, kwargs = case.sparse(ids)
    return _call(function, args, {**kwargs, **more})


def call_dense(function, case, **more):
    args, kwargs = case.dense()
    return _call(function, args, {**kwargs, **more})


def _call(function, args, kwargs):
    q = args[0]
    dtype = torch.bfloat16 if q.dtype in FP8 else q.dtype
    out, lse = nan_like(q.shape, dtype), nan_like(q.shape[:2], torch.float32)
    kwargs = {"out": out, "lse": lse, **kwargs}
    result = function(*args, return_lse=True, **kwargs)
    assert isinstance(result, tuple) and len(result) == 2
    assert result[0].data_ptr() == kwargs["out"].data_ptr() and result[1].data_ptr() == kwargs["lse"].data_ptr()
    return kwargs["out"], kwargs["lse"]


def hostile(q_lens, kv_lens, q_dtype, kv_dtype, seed):
    """(arguments and options of sparse_attention, causal, what it is): number `seed` of a row of draws in which every layout,
    page size and kind of scale comes up."""
    layout = LAYOUTS[seed % len(LAYOUTS)]
    heads = [(16, 1), (8, 1), (32, 2), (4, 2), (3, 3), (10, 2)][seed]
    causal = seed != 4
    case = make(
        q_lens,
        kv_lens,
        heads=heads,
        page=64 if seed % 2 else 128,
        dtype=q_dtype,
        kv_dtype=kv_dtype,
        layout=layout,
        topk=[16, 4, 8, 32, 16, 16][seed],
        causal=causal,
        pad_rows=3 if seed % 3 == 0 else 0,
        scales=[None, "scalar", "head"][seed % 3] if kv_dtype.itemsize == 1 else None,
        seed=100 + seed,
    )
    ids = [case.ids, head_major(case.ids), unaligned(case.ids)][seed % 3]
    return case.sparse(ids), causal, f"{layout} {heads}"
