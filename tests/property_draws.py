"""Hypothesis strategies for the calls of every public operation, all that the contract lets through: shapes, strides,
dtypes, layouts, lengths, and indices that are no good.

A draw decides the structure; a seed in it gives the data (cases.py). What a draw makes is the arguments of the public
function on the CPU, and the arguments that the oracle takes for the same problem (it knows pages only, so contiguous
caches are cut into pages for it).
"""

import typing

import cases
import torch
from contiguous import LAYOUTS as CONTIGUOUS
from contiguous import contiguous
from hypothesis import strategies as st

import m3_sparse

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}
# The least bit pattern, but for the sign, of what is not finite.
NOT_FINITE = dict(zip(DTYPES.values(), (0x7F80, 0x7C00, 0x7F800000, 0x7F, 0x7C)))
WILD32 = (-1, -2, -(2**31), 2**31 - 1, 2**30, 1 << 20, 5000)
ODD_SCALES = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0, -0.7, -2.0, 1e-3, 1e-30, 30.0)
WILD64 = (*WILD32, 2**31, -(2**31) - 1, 2**40, -(2**63), 2**63 - 1)
SOFTMAX_SCALES = (0.0, -0.0, 1.0, -0.3, 0.02, 3, 1e-30, float("nan"), float("inf"), -float("inf"))
Q_LENS = st.one_of(st.integers(0, 4), st.sampled_from([1, 1, 8, 9, 16, 17, 33]))
KV_LENS = st.one_of(
    st.integers(0, 300), st.sampled_from([0, 1, 63, 64, 65, 127, 128, 129, 130, 191, 255, 256, 257, 384])
)
LONG = st.sampled_from([2047, 2048, 2049, 2176, 2300])


class Space(typing.NamedTuple):
    """What a backend takes."""

    backend: str
    heads: tuple  # (Hq, Hkv)
    index_heads: tuple
    most_ids: int
    formulations: tuple = (None,)
    expanded_dense: bool = True  # dense attention over strides of 0

    def dtypes(self, op):
        rows = [r for r in m3_sparse.capabilities() if r.op == op and r.backend == self.backend and r.dtypes]
        split = ">" if op == "merge_states" else "+"
        return [tuple(DTYPES[x] for x in pair.split(split)) for pair in rows[0].dtypes]


TORCH = Space("torch", ((1, 1), (2, 1), (3, 3), (6, 2), (4, 4), (16, 1), (20, 1), (8, 2)), (1, 2, 3, 4, 5), 40)
AOT = Space(
    "aot", ((16, 1), (16, 1), (32, 2), (8, 1), (1, 1), (4, 2), (6, 2), (3, 3), (12, 1)), (1, 2, 4, 4, 3, 8), 32,
    (None, "decode", "union", "kv_stationary"), False,
)  # fmt: skip


class Call(typing.NamedTuple):
    """`arguments`: of the public function, by name. `exact`: positional and named arguments of the oracle's."""

    arguments: dict
    exact: tuple
    named: dict
    story: dict  # what else judging takes

    def __repr__(self):
        return "\n".join(f"{name} = {describe(x)}" for name, x in {**self.arguments, **self.story}.items())


def describe(x):
    """A tensor by dtype, shape and strides; small ones of indices and lengths by their values too."""
    if isinstance(x, (list, tuple)):
        return f"[{', '.join(map(describe, x))}]"
    if not isinstance(x, torch.Tensor):
        return repr(x)
    text = f"{str(x.dtype)[6:]} {list(x.shape)} strides {list(x.stride())} from {x.storage_offset()}"
    return f"{text}: {x.tolist()}" if x.numel() <= 80 and x.dtype in (torch.int32, torch.int64, torch.float32) else text


def some(draw, *choices):
    return draw(st.sampled_from(choices))


# --------------------------------------------------------------------------------------------------------- small pieces


def strided_rows(draw, x):
    """q or out [T, H, 128] with other strides, 16-byte aligned: (view, buffer behind it)."""
    tokens, heads, dim = x.shape
    form = some(draw, "plain", "plain", "head-major", "padded", "fused")
    if form == "head-major":
        buffer = x.new_empty(heads, tokens, dim)
        view = buffer.transpose(0, 1)
    elif form == "padded":
        buffer = x.new_empty(tokens + 1, heads + 1, dim + 16)
        view = buffer[1:, :heads, 16:]
    elif form == "fused":  # a slice of one projection's result
        buffer = x.new_empty(tokens, heads + 3, dim)
        view = buffer[:, 2 : heads + 2]
    else:
        return x, x
    fill(buffer)
    view.copy_(x)
    return view, buffer


def fill(buffer):
    buffer.view(torch.uint8).fill_(0x7F)


def strided_indices(draw, x, wild_dtype=True):
    """Indices as int32 or int64, with other strides."""
    if wild_dtype and draw(st.booleans()):
        x = x.long()
    form = some(draw, "plain", "plain", "slice", "step", "transposed")
    if form == "slice":
        wide = torch.full((*x.shape[:-1], x.shape[-1] + 3), 1 << 29, dtype=x.dtype)
        wide[..., 1:-2] = x
        return wide[..., 1:-2]
    if form == "step":
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), 1 << 29, dtype=x.dtype)
        wide[..., ::2] = x
        return wide[..., ::2]
    if form == "transposed" and x.dim() > 1:
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    return x


def garbled(draw, x, share, wild=WILD32):
    """A share of the entries replaced by numbers that are no good."""
    gen = cases.generator(draw(st.integers(0, 2**20)))
    at = torch.rand(x.shape, generator=gen) < share
    x = x.clone()
    choice = torch.tensor(wild)[torch.randint(0, len(wild), x.shape, generator=gen)].to(x.dtype)
    x[at] = choice[at]
    return x


def scale_of(draw, heads):
    form = some(draw, "none", "one", "heads", "strided", "expanded")
    if form == "none":
        return None
    gen = cases.generator(draw(st.integers(0, 2**20)))
    values = 0.25 + 2 * torch.rand(2 * heads, generator=gen)
    if some(draw, False, False, True) and heads:  # of some heads, or of all
        at = torch.rand(2 * heads, generator=gen) < some(draw, 0.3, 1)
        values[at] = draw(st.sampled_from(ODD_SCALES))
    if form == "one":
        return some(draw, values[:1], values[0], values[:1].view(1, 1))
    if form == "heads":
        return some(draw, values[:heads], values[:heads].view(heads, 1))
    return values[::2] if form == "strided" else values[:1].expand(heads)


def requests(draw, long_ok=True):
    """(q_lens, kv_lens)"""
    if some(draw, *[False] * 19, True):
        return [], []
    pairs = draw(st.lists(st.tuples(Q_LENS, KV_LENS), min_size=1, max_size=4))
    if long_ok and draw(st.integers(0, 5)) == 0:
        pairs = [(min(pairs[0][0], 5), draw(LONG)), *pairs[1:2]]
    return [q for q, _ in pairs], [k for _, k in pairs]


def layouts(kv_lens, index=False):
    return ("hnd", "padded", "dense") if index else cases.LAYOUTS


# ---------------------------------------------------------------------------------------------------------------- pages


def in_pages(cache, seqused, leftpad):
    """Contiguous [B, H, S, 128] as (pages [P, H, 128, 128], table, lengths): what it is by definition."""
    batch, heads, length, dim = cache.shape
    pad = torch.zeros(batch, dtype=torch.int64) if leftpad is None else leftpad.long().clamp(0, length)
    room = length - pad
    used = torch.minimum(seqused.long().clamp(min=0), room)
    blocks = max(1, -(-length // 128))
    pages = torch.zeros(batch * blocks, heads, 128, dim, dtype=cache.dtype)
    for b in range(batch):
        n = int(used[b])
        rows = cache[b, :, int(pad[b]) : int(pad[b]) + n]
        for block in range(-(-n // 128)):
            part = rows[:, block * 128 : (block + 1) * 128]
            pages[b * blocks + block, :, : part.shape[1]] = part
    return pages, torch.arange(batch * blocks).view(batch, blocks), used


def plain_zero(x):
    """NaN and infinities of a cache become zeros, in place: for draws in which poison would be visible."""
    if x.dim() > 2 and x.stride(0) == cases.DIM:  # overlapping pages: each token once
        x = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32}[x.dtype.itemsize]
    bits, least = x.view(whole), NOT_FINITE[x.dtype]
    bits.masked_fill_((bits & torch.iinfo(whole).max) >= least, 0)


def tamper(draw, case, table_name, caches):
    """Lengths, page numbers and strides that are legal and odd; changes the case. Returns what else was done."""
    what = some(
        draw, "nothing", "nothing", "nothing", "pages", "pages", "beyond", "beyond", "negative", "negative", "shared",
        "shared", "expanded pages", "expanded pages", "expanded heads", "expanded heads", "no pages", "no columns",
    )  # fmt: skip
    table = getattr(case, table_name)
    if what in ("beyond", "shared", "expanded pages", "expanded heads"):
        for name in caches:
            plain_zero(getattr(case, name))
    if what == "pages":
        table = garbled(draw, table, 0.3)
    elif what == "beyond":
        case.seqused_k = garbled(draw, case.seqused_k, 0.6, (2**31 - 1, 2**30, 100000, 3))
    elif what == "negative":
        case.seqused_k = garbled(draw, case.seqused_k, 0.5, (-1, -(2**31), -129))
    elif what == "shared" and len(table):
        table = table[:1].expand(table.shape)
    elif what == "expanded pages":
        for name in caches:
            x = getattr(case, name)
            setattr(case, name, x[:1].expand(x.shape))
    elif what == "expanded heads":
        for name in caches:
            x = getattr(case, name)
            if x.dim() == 4:
                setattr(case, name, x[:, :1].expand(x.shape))
    elif what == "no pages":
        for name in caches:
            setattr(case, name, getattr(case, name)[:0])
    elif what == "no columns":
        table = table[:, :0]
    setattr(case, table_name, table)
    return what


def lengths_of(draw, case):
    """cu_seqlens_q and seqused_k in some dtype and with some strides."""
    return strided_indices(draw, case.cu_seqlens_q), strided_indices(draw, case.seqused_k)


def widen(draw, table):
    """A page table of int32 or int64; some entries of int64 need 64 bits."""
    if some(draw, False, True):
        table = table.long()
        table = torch.where(table < 0, torch.tensor(-(2**40)), table)
    return table if table.stride(0) == 0 else strided_indices(draw, table, wild_dtype=False)


# ------------------------------------------------------------------------------------------------------------ attention


def make(q_lens, kv_lens, **options):
    """cases.make, which wants at least one request."""
    if q_lens:
        return cases.make(q_lens, kv_lens, **options)
    case = cases.make([0], [0], **options)
    case.block_table, case.index_table = case.block_table[:0], case.index_table[:0]
    case.cu_seqlens_q, case.seqused_k = case.cu_seqlens_q[:1], case.seqused_k[:0]
    case.q_lens, case.kv_lens = [], []
    return case


def drawn_case(draw, space, op, **options):
    pairs = space.dtypes(op)
    q_dtype, kv_dtype = some(draw, *pairs)
    q_lens, kv_lens = requests(draw)
    heads = some(draw, *space.heads)
    if kv_lens and max(kv_lens) > 1000 and heads[1] > 2:
        heads = space.heads[0]
    case = make(
        q_lens, kv_lens, heads=heads, page=some(draw, 64, 128), dtype=q_dtype, kv_dtype=kv_dtype,
        layout=some(draw, *cases.LAYOUTS), kind=some(draw, "normal", "normal", "normal", "int"),
        pad_rows=draw(st.integers(0, 2)), seed=draw(st.integers(0, 2**31)), **options,
    )  # fmt: skip
    return case


def rescaled(draw, case):
    """Sizes of q and v other than 1: flat and steep softmaxes, values near the ends of fp16."""
    factor = some(draw, 1, 1, 1, 0, 1e-3, 8, 64)
    case.q = case.q * factor if factor != 1 else case.q
    if case.v_cache.dtype.itemsize > 1:
        size = some(draw, 1, 1, 1, 0, 1e-3, 1e-6, 300, 8000)
        v = case.v_cache
        if v.stride(0) == cases.DIM:  # overlapping pages: each token once
            v = torch.empty(0, dtype=v.dtype).set_(v.untyped_storage())
        v.mul_(size)
    return factor


def attention_options(draw, space, case, dense):
    softmax_scale = some(draw, None, None, None, None, *SOFTMAX_SCALES)
    options = {"causal": draw(st.booleans()), "softmax_scale": softmax_scale}
    heads = case.k_cache.shape[1]
    if draw(st.booleans()):
        options["k_scale"], options["v_scale"] = scale_of(draw, heads), scale_of(draw, heads)
    return options


def attention(draw, space, dense=False):
    """A call of sparse_attention, or of dense_attention."""
    op = "dense_attention" if dense else "sparse_attention"
    topk = draw(st.one_of(st.sampled_from([16, 4, 1, space.most_ids]), st.integers(1, space.most_ids)))
    case = drawn_case(draw, space, op, topk=topk, style=some(draw, "wild", "wild", "clean"))
    rescaled(draw, case)
    options = attention_options(draw, space, case, dense)
    q, q_buffer = strided_rows(draw, case.q)
    ids = None if dense else selection_of(draw, case, space)
    if case.kv_lens and draw(st.integers(0, 3)) == 0:
        caches, table, lengths, exact = contiguous_attention(draw, space, case, dense)
    else:
        what = tamper(draw, case, "block_table", ("k_cache", "v_cache"))
        if dense and not space.expanded_dense and what.startswith("expanded"):
            case.k_cache, case.v_cache = case.k_cache.contiguous(), case.v_cache.contiguous()
        if what == "nothing" and some(draw, False, False, True):  # K and V that lie differently
            case.v_cache = case.v_cache.transpose(1, 2).contiguous().transpose(1, 2)
        caches, table = (case.k_cache, case.v_cache), widen(draw, case.block_table)
        used = strided_indices(draw, case.seqused_k)
        lengths = {"seqused_k": used}
        exact = (*caches, table, used)
    cu = strided_indices(draw, case.cu_seqlens_q)
    k_cache, v_cache, exact_table, exact_used = exact
    arguments = {"q": q, "k_cache": caches[0], "v_cache": caches[1], "block_table": table, "cu_seqlens_q": cu}
    arguments.update(lengths, **options)
    named = {**options, "cu_seqlens_q": cu, "seqused_k": exact_used}
    if dense:
        return Call(arguments, (q, k_cache, v_cache, exact_table), named, outputs(draw, case.q))
    arguments["block_indices"] = ids
    story = outputs(draw, case.q)
    story["formulation"] = formulation_of(draw, space, case)
    return Call(arguments, (q, k_cache, v_cache, ids, exact_table), named, story)


def formulation_of(draw, space, case):
    union = case.q.shape[1] == 16 * case.k_cache.shape[1]
    return some(draw, *[name for name in space.formulations if union or name != "union"])


def selection_of(draw, case, space):
    ids = case.ids
    often = ("as drawn", "as drawn", "head-major", "unaligned", "garbage", "one for all", "repeated")
    form = some(draw, *often, *often, "none")
    if form == "garbage":
        ids = garbled(draw, ids, 0.4)
    elif form == "one for all" and ids.shape[1]:
        ids = ids[:, :1].expand(ids.shape)
    elif form == "repeated" and ids.shape[2]:
        ids = ids[..., :1].expand(ids.shape)
    elif form == "head-major":
        ids = cases.head_major(ids)
    elif form == "unaligned":
        ids = cases.unaligned(ids)
    elif form == "none":
        ids = ids[..., :0]
    if some(draw, False, False, True):
        ids = ids.long()
        if form == "garbage":
            ids = garbled(draw, ids, 0.3, WILD64)
    return ids


def outputs(draw, q):
    """Whether out and lse are given, and how they lie."""
    dtype = q.dtype
    story = {"out": None, "lse": None, "buffers": [], "return_lse": True}
    if draw(st.booleans()):
        view, buffer = strided_rows(draw, torch.empty(q.shape, dtype=dtype))
        fill(buffer)
        story["out"] = view
        story["buffers"].append((view, buffer))
    if draw(st.booleans()):
        form = some(draw, "plain", "transposed", "step")
        if form == "transposed":
            lse = torch.empty(q.shape[1], q.shape[0]).T
            buffer = lse
        elif form == "step":
            buffer = torch.empty(q.shape[0], 2 * q.shape[1] + 1)
            lse = buffer[:, 1::2]
        else:
            lse = buffer = torch.empty(q.shape[:2])
        buffer.fill_(float("nan"))
        story["lse"] = lse
        story["buffers"].append((lse, buffer))
    story["return_lse"] = some(draw, True, True, False)
    return story


def contiguous_attention(draw, space, case, dense):
    """(caches, None, lengths, (k, v, table, lengths) for the oracle) of the case in contiguous caches."""
    pads = draw(st.sampled_from([None, [draw(st.integers(0, 200)) for _ in case.kv_lens]]))
    k, v, _, leftpad = contiguous(case, draw(st.integers(0, 70)), pads, some(draw, *CONTIGUOUS))
    used = case.seqused_k
    odd = some(draw, "nothing", "nothing", "lengths", "pads", "expanded")
    if odd in ("lengths", "pads", "expanded"):
        plain_zero(k)
        plain_zero(v)
    if odd == "lengths":
        used = garbled(draw, used, 0.5, WILD32)
    if odd == "pads" and leftpad is not None:
        leftpad = garbled(draw, leftpad, 0.5, WILD32)
    if odd == "expanded" and (space.expanded_dense or not dense):
        k, v = k[:1].expand(k.shape), v[:1].expand(v.shape)
    used = strided_indices(draw, used)
    lengths = {"seqused_k": used}
    if leftpad is not None:
        leftpad = lengths["leftpad_k"] = strided_indices(draw, leftpad)
    k_pages, table, exact_used = in_pages(k, used, leftpad)
    v_pages, _, _ = in_pages(v, used, leftpad)
    return (k, v), None, lengths, (k_pages, v_pages, table, exact_used)


# ------------------------------------------------------------------------------------------------------------ selection


def special_keys(draw, case):
    """NaN and infinities in some visible keys; everything is defined with them."""
    keys = case.index_k_cache
    form = some(draw, "no", "no", "no", "nan", "inf")
    if form == "no" or not keys.numel() or keys.stride(0) == 0:
        return
    gen = cases.generator(draw(st.integers(0, 2**20)))
    at = torch.rand(keys.shape[:2], generator=gen) < 0.02
    wide = keys.float()
    wide[at, 3] = float("nan") if form == "nan" else float("inf")
    if keys.dtype == torch.float8_e4m3fn and form == "inf":
        wide[at, 3] = 448.0
    keys.copy_(wide.to(keys.dtype))


def scoring(draw, space, op):
    """A call of block_scores or select_blocks."""
    q_dtype, kv_dtype = some(draw, *space.dtypes(op))
    q_lens, kv_lens = requests(draw)
    heads = some(draw, *space.index_heads)
    kind = some(draw, "normal", "normal", "int")
    case = make(
        q_lens, kv_lens, heads=(heads, heads), page=some(draw, 64, 128),
        dtype=torch.bfloat16 if q_dtype.itemsize == 1 else q_dtype, kv_dtype=kv_dtype,
        layout=some(draw, "hnd", "padded", "dense"), kind=kind, pad_rows=draw(st.integers(0, 2)), topk=1, style="clean",
        seed=draw(st.integers(0, 2**31)),
    )  # fmt: skip
    pow2 = heads & (heads - 1) == 0
    if space.backend == "aot" and not pow2 and (q_dtype.itemsize == 1 or len(case.q) > 32 * len(kv_lens)):
        case.index_q = case.index_q[:, :1]
    case.index_q = (case.index_q * some(draw, 1, 1, 0, 1e-3, 30)).to(q_dtype)
    query = some_rows(draw, case.index_q)
    special_keys(draw, case)
    cu = strided_indices(draw, case.cu_seqlens_q)
    if case.kv_lens and draw(st.integers(0, 3)) == 0:
        pads = draw(st.sampled_from([None, [draw(st.integers(0, 200)) for _ in case.kv_lens]]))
        _, _, keys, leftpad = contiguous(case, draw(st.integers(0, 70)), pads, some(draw, "HND", "NHD"))
        used = case.seqused_k
        if some(draw, False, False, True):
            plain_zero(keys)
            used = garbled(draw, used, 0.5, WILD32)
            leftpad = None if leftpad is None else garbled(draw, leftpad, 0.5, WILD32)
        used = strided_indices(draw, used)
        arguments = {"index_q": query, "index_k_cache": keys, "block_table": None, "seqused_k": used}
        if leftpad is not None:
            arguments["leftpad_k"] = leftpad = strided_indices(draw, leftpad)
        pages, table, exact_used = in_pages(keys[:, None], used, leftpad)
        exact = (query, pages[:, 0], table)
        blocks = -(-keys.shape[1] // 128)
    else:
        tamper(draw, case, "index_table", ("index_k_cache",))
        table, used = widen(draw, case.index_table), strided_indices(draw, case.seqused_k)
        arguments = {"index_q": query, "index_k_cache": case.index_k_cache, "block_table": table, "seqused_k": used}
        exact, exact_used = (query, case.index_k_cache, table), used
        blocks = -(-table.shape[1] * case.page // 128)
    arguments["cu_seqlens_q"] = cu
    story = {"blocks": blocks}
    if op == "select_blocks":
        local, init = draw(st.integers(0, 3)), draw(st.integers(0, 3))
        topk = min(space.most_ids, max(1, local + init + draw(st.one_of(st.integers(0, 16), st.integers(0, 34)))))
        arguments.update(topk=topk, local_blocks=local, init_blocks=init)
        story["out"], story["buffer"] = selection_output(draw, len(query), query.shape[1], topk)
    return Call(arguments, exact, {"cu_seqlens_q": cu, "seqused_k": exact_used}, story)


def selection_output(draw, rows, heads, topk):
    form = some(draw, "none", "plain", "head-major", "unaligned", "k-major")
    shape = (rows, heads, topk)
    if form == "none":
        return None, None
    if form == "head-major":
        buffer = torch.full((heads, rows + 2, topk), 77, dtype=torch.int32)
        return buffer[:, :rows].transpose(0, 1), buffer
    if form == "unaligned":
        buffer = torch.full((rows, heads, topk + 5), 77, dtype=torch.int32)
        return buffer[..., 1 : topk + 1], buffer
    if form == "k-major":
        buffer = torch.full((topk, heads, rows), 77, dtype=torch.int32)
        return buffer.permute(2, 1, 0), buffer
    buffer = torch.full(shape, 77, dtype=torch.int32)
    return buffer, buffer


# --------------------------------------------------------------------------------------------------------- store, merge


def numbers(shape, dtype, gen):
    """Values of every size, special ones too."""
    x = torch.randn(shape, generator=gen) * torch.tensor([1e-6, 1e-3, 1.0, 40.0, 600.0, 7e4])[
        torch.randint(0, 6, shape, generator=gen)
    ]  # fmt: skip
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 448.0, 464.0, 57344.0, 2.0**-10, 3e38, 1e-40])
    at = torch.rand(shape, generator=gen) < 0.05
    x[at] = odd[torch.randint(0, len(odd), shape, generator=gen)][at]
    if dtype.itemsize == 1:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=gen).view(dtype)
    return x.to(dtype)


def store(draw, space):
    source, kept = some(draw, *space.dtypes("store_kv"))
    index = some(draw, "none", "like k", "plain", "other")
    index_source, index_kept = source, kept
    if index == "plain":
        index_source = index_kept = torch.bfloat16
    elif index == "other":
        index_source, index_kept = some(draw, *space.dtypes("store_kv"))
        if space.backend == "aot" and source != kept and index_source != index_kept:
            index_source = index_kept  # one conversion in a call
    tokens, heads, page = draw(st.integers(0, 20)), draw(st.integers(1, 4)), some(draw, 64, 128)
    pages = draw(st.integers(0, 4))
    gen = cases.generator(draw(st.integers(0, 2**31)))
    k, v = (some_rows(draw, numbers((tokens, heads, 128), source, gen)) for _ in range(2))
    slots = torch.full((tokens,), -1, dtype=torch.int64)
    real = torch.randperm(pages * page, generator=gen)[:tokens]
    slots[: len(real)] = real
    slots = slots[torch.randperm(tokens, generator=gen)]
    share = some(draw, 0, 0.3, 1)
    wide = draw(st.booleans())
    slots = garbled(draw, slots, share, [w for w in (WILD64 if wide else WILD32)] + [pages * page, pages * page + 7])
    slots = slots if wide else slots.to(torch.int32)
    # 5000 may be a slot of nobody only
    slots = torch.where(slots == 5000, -1, slots) if pages * page > 5000 else slots
    layout = some(draw, "hnd", "nhd", "packed", "padded")
    k_cache, v_cache = cases.empty_pages(layout, pages, heads, page, 2, kept, "nan")
    arguments = {"k": k, "v": v, "index_k": None, "k_cache": k_cache, "v_cache": v_cache, "index_k_cache": None}
    if index != "none":
        arguments["index_k"] = some_rows(draw, numbers((tokens, 1, 128), index_source, gen))[:, 0]
        [cache] = cases.empty_pages(some(draw, "hnd", "padded"), pages, 1, page, 1, index_kept, "nan")
        arguments["index_k_cache"] = cache[:, 0]
    arguments["slot_mapping"] = strided_indices(draw, slots, wild_dtype=False)
    arguments["k_scale"], arguments["v_scale"] = scale_of(draw, heads), scale_of(draw, heads)
    return Call(arguments, (), {}, {})


def some_rows(draw, x):
    return strided_rows(draw, x)[0]


def merge(draw, space):
    dtype, out_dtype = some(draw, *space.dtypes("merge_states"))
    states = draw(st.one_of(st.integers(1, 5), st.sampled_from([16, 17, 33])))
    tokens, heads = draw(st.integers(0, 6)), draw(st.integers(0, 5))
    gen = cases.generator(draw(st.integers(0, 2**31)))
    shape = (states, tokens, heads)
    outs = (torch.randn(*shape, 128, generator=gen) * some(draw, 1, 1e-3, 300)).to(dtype)
    lses = torch.randn(shape, generator=gen) * some(draw, 0, 1, 8, 100, 1e4) + some(draw, 0, 0, 1e3, -1e5)
    dead = torch.rand(shape, generator=gen) < some(draw, 0, 0.3, 1)
    lses[dead] = -float("inf")
    outs[dead] = float("nan")
    if out_dtype == dtype:
        out_dtype = some(draw, dtype, None)
    special = some(draw, "no", "no", "no", "nan", "inf")
    if special != "no" and lses.numel():
        lses[torch.rand(shape, generator=gen) < 0.1] = float(special)
    form = some(draw, "tensors", "lists", "strided", "expanded")
    if form == "lists":
        return Call({"outs": list(outs), "lses": list(lses), "out_dtype": out_dtype}, (outs, lses), {}, {})
    if form == "strided":
        buffer = outs.new_full((tokens, heads + 1, states, 136), float("nan"))
        view = buffer[:, :heads, :, 8:].permute(2, 0, 1, 3)
        view.copy_(outs)
        outs, lses = view, lses.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    elif form == "expanded":
        outs, lses = outs[:1].expand(outs.shape), lses[:1].expand(lses.shape)
    return Call({"outs": outs, "lses": lses, "out_dtype": out_dtype}, (outs, lses), {}, {})


def calls(function, *args):
    """A strategy of `function(draw, *args)`."""
    return st.composite(function)(*args)
