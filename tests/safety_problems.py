"""Calls of every public function whose tensors stand on edges and whose indices are wrong in every way, with what must
come out. test_memory_safety.py, test_emulated_memory_safety.py and gpu/test_memory_safety_gpu.py run them.

Everything but inconsistent offsets has a documented result: an id, page or slot that is none contributes nothing, a length
is clamped to what the table reaches. Rows of offsets that descend or pass the tokens may hold anything; nothing may fault.
"""

import dataclasses
import random
import typing

import cases
import oracle
import torch
from contiguous import contiguous
from edge_memory import Placed

import m3_sparse

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
INT_MAX, INT_MIN = 2**31 - 1, -(2**31)
WILD = (-1, INT_MAX, INT_MIN, -7, 1 << 20, INT_MAX - 1, INT_MIN + 1, 0x40000000)
WIDE = (2**63 - 1, -(2**63), 2**32, -(2**32) + 1, 2**40 + 1)  # what int64 arguments may hold besides
Q_LENS, KV_LENS = [3, 9, 0, 6], [300, 150, 77, 129]
OFFSETS = (
    [0, 3, 2, 12, 18], [0, 3, 1000, 12, 18], [5, 3, 12, 12, 18], [-4, 3, 12, 12, 18], [0, INT_MAX, INT_MIN, 12, 18],
    [INT_MIN, 0, INT_MAX, -1, 17], [0, 0, 0, 0, 0], [0, 3, 12, 12, INT_MAX], [18, 12, 12, 3, 0], [INT_MAX] * 5,
)  # fmt: skip
ATTENTION_DTYPES = ((BF16, BF16), (BF16, E4M3), (FP16, FP16), (BF16, E5M2), (FP16, E4M3), (FP16, E5M2))
SELECTION_DTYPES = ((BF16, BF16), (BF16, E4M3), (FP16, FP16), (E4M3, E4M3), (FP16, E4M3))
WRONG = ("ids", "pages", "long", "negative", "wide", "offsets")


@dataclasses.dataclass
class Problem:
    name: str
    call: typing.Callable  # with the arguments by name; returns a tensor, a tuple of them or None
    arguments: dict  # tensors of the CPU and whatever else `call` takes
    written: tuple  # names of the arguments that it writes
    # With the written arguments and results by name, raises; None: anything may come out.
    check: typing.Callable | None
    options: dict = dataclasses.field(default_factory=dict)

    def run(self, backend, edges):
        """On one backend, with the tensors on `edges`; everything is checked."""
        placed = Placed(self.arguments, edges)
        with m3_sparse.backend(backend):
            returned = self.call(**placed.tensors, **self.options)
        edges.check()  # synchronises
        placed.check_only(self.written)
        found = {name: x for name, x in placed.results().items() if name in self.written}
        given = {x.data_ptr() for name, x in placed.tensors.items() if name in self.written and torch.is_tensor(x)}
        fresh = [x for x in (returned if isinstance(returned, tuple) else (returned,)) if x is not None]
        for n, x in enumerate(x for x in fresh if x.data_ptr() not in given):
            found[f"returned {n}"] = x.cpu()
        if self.check is not None:
            self.check(found)


def wild(count, random_, more=()):
    return torch.tensor([random_.choice((*WILD, *more)) for _ in range(count)], dtype=torch.int64)


def replace_some(x, share, random_, more=()):
    """The tensor with a share of its values wild, in a copy of the same strides' contiguous form."""
    flat = x.flatten().long()
    at = torch.tensor([random_.random() < share for _ in range(len(flat))], dtype=torch.bool)
    values = torch.where(at, wild(len(flat), random_, more), flat).view(x.shape)
    return values.to(x.dtype)


def gapped(shape, dtype, style):
    """An output full of NaN (ids: of a value that is none) whose rows lie apart, as `style` says."""
    rows, heads, width = shape
    value = -77 if dtype == torch.int32 else float("nan")
    if style == 0:
        return torch.full(shape, value, dtype=dtype)
    if style == 1:  # head-major
        return torch.full((heads, rows, width), value, dtype=dtype).transpose(0, 1)
    pad = 16 // dtype.itemsize
    return torch.full((rows, heads + 1, width + pad), value, dtype=dtype)[:, :heads, :width]


def gapped_lse(shape, style):
    rows, heads = shape
    full = {0: (rows, heads), 1: (heads, rows), 2: (rows, heads + 3)}[style]
    x = torch.full(full, float("nan"))
    return x.t() if style == 1 else x[:, :heads]


def spoil(case, kind, random_):
    """Makes a case's indices wrong; True if what must come out is still defined."""
    if kind == "pages":
        pages = (*WILD, len(case.k_cache))
        for table in (case.block_table, case.index_table):
            where = torch.tensor([[random_.random() < 0.3 for _ in range(table.shape[1])] for _ in table])
            values = torch.tensor([[random_.choice(pages) for _ in range(table.shape[1])] for _ in table])
            table[where] = values.to(torch.int32)[where]
    elif kind == "long":  # past all that the table reaches; what stands there are zeros
        case.seqused_k.copy_(torch.tensor([INT_MAX, 150, 1 << 20, INT_MAX - 1]))
    elif kind == "negative":
        case.seqused_k.copy_(torch.tensor([INT_MIN, 150, -1, -129]))
    elif kind == "wide":  # int64 arguments, of which some no int32 can hold
        case.ids = replace_some(case.ids, 0.3, random_, WIDE)
        case.seqused_k = torch.tensor([2**40, 150, -(2**63), 2**63 - 1])
        case.cu_seqlens_q = case.cu_seqlens_q.long()
        for name in ("block_table", "index_table"):
            table = getattr(case, name).long()
            inside = table >= 0
            table[~inside] = torch.where(table[~inside] == -1, 2**40, 2**32)
            setattr(case, name, table)
    elif kind == "offsets":
        case.cu_seqlens_q.copy_(torch.tensor(OFFSETS[random_.randrange(len(OFFSETS))]))
        if random_.random() < 0.5:
            case.seqused_k.copy_(wild(len(case.seqused_k), random_))
        return False
    return True


def draw(seed, dtypes, heads, wrong, **options):
    q, kv = dtypes
    case = cases.make(
        Q_LENS, KV_LENS, heads=heads, dtype=q, kv_dtype=kv, layout=cases.LAYOUTS[seed % 5],
        page=128 if seed // 2 % 2 else 64, pad_rows=2 if seed % 3 == 0 else 0, seed=seed,
        poison="zero" if wrong in ("long", "wide") else "nan", offsets=torch.int64 if wrong == "wide" else torch.int32,
        **options,
    )  # fmt: skip
    return case


def attention(function, seed, formulation=None):
    """Sparse or dense attention number `seed`: everything that can vary does so with it."""
    random_ = random.Random(seed)
    sparse = function == "sparse_attention"
    dtypes = ATTENTION_DTYPES[(seed + seed // 5) % 6] if sparse else ATTENTION_DTYPES[seed % 2 * 2]
    kind = WRONG[(seed + seed // 6) % 6] if sparse else WRONG[1:][(seed + seed // 6) % 5]
    heads = (
        [(16, 1), (32, 2)][seed % 2] if formulation in (None, "union") else [(8, 1), (16, 1), (4, 2), (6, 3)][seed % 4]
    )
    causal = seed % 7 != 3
    case = draw(
        seed, dtypes, heads, kind, topk=[16, 4, 8, 32][seed % 4], causal=causal,
        scales=[None, "scalar", "head"][seed % 3] if dtypes[1].itemsize == 1 else None,
    )  # fmt: skip
    defined = spoil(case, kind, random_)
    if sparse:
        case.ids = [lambda x: x, cases.head_major, cases.unaligned][seed % 3](case.ids)
    args, options = case.sparse() if sparse else case.dense()
    names = ("q", "k_cache", "v_cache", *(("block_indices",) if sparse else ()), "block_table")
    arguments = dict(zip(names, args), **options)
    arguments["out"] = gapped(case.q.shape, dtypes[0], seed % 3)
    arguments["lse"] = gapped_lse(case.q.shape[:2], seed // 2 % 3)
    want = None
    if defined:
        compute = oracle.sparse_attention if sparse else oracle.dense_attention
        want = compute(*args, **options, causal=causal)

    def check(found):
        oracle.check_attention(found["out"], found["lse"], *want)

    extra = {"causal": causal, "return_lse": True, **({"formulation": formulation} if sparse else {})}
    name = f"{function}-{seed}-{formulation or 'default'}-{kind}-{cases.LAYOUTS[seed % 5]}"
    return Problem(name, getattr(m3_sparse, function), arguments, ("out", "lse"), check if defined else None, extra)


def contiguous_attention(function, seed, formulation=None):
    """Without a page table: rows that end with the cache, padding on the left and lengths that no row has."""
    dtypes = [(BF16, BF16), (FP16, E4M3)][seed % 2] if function == "sparse_attention" else (BF16, BF16)
    case = cases.make(Q_LENS, KV_LENS, heads=(16, 1), dtype=dtypes[0], kv_dtype=dtypes[1], seed=seed, topk=4)
    pads = [0, 150, 0, 171] if seed % 2 else None
    k, v, _, leftpad = contiguous(case, 0, pads, ("HND", "NHD", "packed")[seed % 3])
    sparse = function == "sparse_attention"
    args, options = case.sparse() if sparse else case.dense()
    compute = oracle.sparse_attention if sparse else oracle.dense_attention
    arguments = {"q": case.q, "k_cache": k, "v_cache": v, **options, "block_table": None, "leftpad_k": leftpad}
    used = case.seqused_k.clone()
    if leftpad is not None:  # rows that fill the cache may say that they are longer
        used[0], used[1], used[3] = INT_MAX, INT_MAX, 2**20
    elif seed % 3 == 0:
        used[0] = INT_MAX
    arguments["seqused_k"] = used
    if seed % 4 == 3:  # a padding beyond the row, or before it: clamped, so the row has no token, or all
        arguments["leftpad_k"] = torch.tensor([INT_MIN, 150, INT_MAX, 171], dtype=torch.int32)
        options["seqused_k"] = torch.tensor([300, 150, 0, 129], dtype=torch.int32)
    if sparse:
        arguments["block_indices"] = case.ids
    arguments["out"], arguments["lse"] = gapped(case.q.shape, dtypes[0], seed % 3), gapped_lse(case.q.shape[:2], 0)
    want = compute(*args, **options)

    def check(found):
        oracle.check_attention(found["out"], found["lse"], *want)

    extra = {"return_lse": True, **({"formulation": formulation} if sparse else {})}
    name = f"{function}-contiguous-{seed}-{formulation or 'default'}"
    return Problem(name, getattr(m3_sparse, function), arguments, ("out", "lse"), check, extra)


def selection_call(way, **arguments):
    """The aot operator with a way forced; see torch-ext/torch_binding.cpp."""
    names = ("out", "scores", "index_q", "index_k_cache", "block_table", "cu_seqlens_q", "seqused_k")
    m3_sparse.ops.BUILT["select_blocks", "aot"](*(arguments[n] for n in names), 1, 0, way)


def selection(function, seed, way=None):
    """select_blocks or block_scores number `seed`; `way` forces the aot operator's kernels."""
    random_ = random.Random(1000 + seed)
    dtypes = SELECTION_DTYPES[(seed + seed // 5) % 5]
    if way == 1 and dtypes[0] == E4M3:
        dtypes = (BF16, E4M3)
    kinds = tuple(k for k in WRONG if k != "ids" and not (way and k == "wide"))
    kind = kinds[(seed + seed // 6) % len(kinds)]
    heads = [(4, 4), (2, 2), (1, 1)][seed % 3]
    case = draw(seed, (BF16 if dtypes[0] == E4M3 else dtypes[0], dtypes[1]), heads, kind, kind="int")
    case.index_q = case.index_q.to(dtypes[0])
    defined = spoil(case, kind, random_)
    args, lengths = case.index()
    arguments = dict(zip(("index_q", "index_k_cache", "block_table"), args), **lengths)
    topk, rows = [16, 4, 32, 1][seed % 4], len(case.index_q)
    epsilon = counts = want = None
    if defined:
        want, epsilon = oracle.block_scores(*args, **lengths), oracle.score_epsilon(*args, **lengths)
        counts = oracle.candidates(*lengths.values(), args[2], case.page, rows)
    options, call, written = {}, getattr(m3_sparse, function), ()
    if function == "select_blocks":
        arguments["out"], written = gapped((rows, heads[1], topk), torch.int32, seed % 3), ("out",)
        if way is None:
            options = {"topk": topk, "return_scores": seed % 2 == 0}
        else:
            blocks = -(-args[2].shape[1] * case.page // 128)
            arguments["scores"] = torch.full((rows, heads[1], blocks), float("nan")) if way < 3 and seed % 2 else None
            written += ("scores",)
            options, call = {"way": way}, selection_call

    def check(found):
        if "out" in found:
            oracle.check_selection(found["out"], want, epsilon, counts, topk=topk)
        for name in ("scores", "returned 0"):
            if name in found:
                oracle.check_close(found[name], want, float(epsilon.max()) * 64, 0, name)

    name = f"{function}-{seed}-way{way or 0}-{kind}-{cases.LAYOUTS[seed % 5]}"
    return Problem(name, call, arguments, written, check if defined else None, options)


NOTHING = ("no rows", "no pages", "no columns", "no requests", "no ids")


def degenerate(function, what, formulation=None):
    """A dimension of size 0. Rows that there are see nothing."""
    case = cases.make(Q_LENS, KV_LENS, heads=(16, 1), dtype=BF16, seed=3)
    if what == "no rows":
        case.q, case.index_q, case.ids = case.q[:0], case.index_q[:0], case.ids[:0]
        case.cu_seqlens_q = torch.zeros(5, dtype=torch.int32)
    elif what == "no pages":
        case.k_cache, case.v_cache, case.index_k_cache = case.k_cache[:0], case.v_cache[:0], case.index_k_cache[:0]
    elif what == "no columns":
        case.block_table, case.index_table = case.block_table[:, :0], case.index_table[:, :0]
    elif what == "no requests":
        case.block_table, case.index_table = case.block_table[:0], case.index_table[:0]
        case.cu_seqlens_q, case.seqused_k = case.cu_seqlens_q[:1], case.seqused_k[:0]
    elif what == "no ids":
        case.ids = case.ids[:, :, :0]
    name = f"{function}-{what}-{formulation or 'default'}"
    if function in ("select_blocks", "block_scores"):
        args, lengths = case.index()
        want = oracle.block_scores(*args, **lengths)
        counts = oracle.candidates(*lengths.values(), args[2], case.page, len(args[0]))
        arguments = dict(zip(("index_q", "index_k_cache", "block_table"), args), **lengths)
        selects = function == "select_blocks"
        if selects:
            arguments["out"] = gapped((len(args[0]), 1, 16), torch.int32, 2)

        def check_ids(found):
            if selects:
                oracle.check_selection(found["out"], want, torch.zeros(want.shape[:2]), counts)
            else:
                assert torch.equal(found["returned 0"].double(), want)

        return Problem(name, getattr(m3_sparse, function), arguments, ("out",) if selects else (), check_ids)
    sparse = function == "sparse_attention"
    args, options = case.sparse() if sparse else case.dense()
    compute = oracle.sparse_attention if sparse else oracle.dense_attention
    names = ("q", "k_cache", "v_cache", *(("block_indices",) if sparse else ()), "block_table")
    arguments = dict(zip(names, args), **options)
    arguments["out"], arguments["lse"] = gapped(case.q.shape, BF16, 2), gapped_lse(case.q.shape[:2], 2)
    want_out = compute(*args, **options)

    def check(found):
        oracle.check_attention(found["out"], found["lse"], *want_out)

    extra = {"return_lse": True, **({"formulation": formulation} if sparse else {})}
    return Problem(name, getattr(m3_sparse, function), arguments, ("out", "lse"), check, extra)


STORE_DTYPES = (
    (BF16, BF16, BF16, BF16), (BF16, E4M3, BF16, E4M3), (FP16, E5M2, FP16, FP16), (FP32, E4M3, FP32, FP32),
    (E4M3, E4M3, BF16, BF16), (FP32, FP32, FP32, FP32), (FP16, FP16, FP16, FP16), (FP32, E5M2, FP32, E5M2),
    (BF16, E5M2, BF16, BF16), (FP16, E4M3, FP16, E4M3), (BF16, BF16, BF16, E4M3),
)  # fmt: skip


def store(seed):
    """store_kv number `seed`: slots of which half lie outside of the caches; rows that are not stored are NaN."""
    random_, generator = random.Random(seed), cases.generator(seed)
    kv, kept, index, index_kept = STORE_DTYPES[seed % len(STORE_DTYPES)]
    heads, page, tokens, pages = [2, 1, 5][seed % 3], [64, 128][seed % 2], [37, 1, 16, 33][seed % 4], 3
    long = seed // 2 % 2 == 0

    def drawn(*shape, dtype):
        return (torch.randn(shape, generator=generator) * 40).to(dtype)

    layout = ("hnd", "nhd", "packed", "padded")[seed % 4]
    k_cache, v_cache = cases.empty_pages(layout, pages, heads, page, 2, kept, "nan")
    [index_cache] = cases.empty_pages("padded" if seed % 2 else "hnd", pages, 1, page, 1, index_kept, "nan")
    slots = torch.randperm(pages * page, generator=generator)[:tokens]
    outside = torch.tensor([random_.random() < 0.5 for _ in range(tokens)])
    more = (pages * page, -1, pages * page, *(WIDE if long else ()))
    slots = torch.where(outside, wild(tokens, random_, more), slots).to(torch.int64 if long else torch.int32)
    k, v, index_k = (
        drawn(tokens, heads, 128, dtype=kv),
        drawn(tokens, heads, 128, dtype=kv),
        drawn(tokens, 128, dtype=index),
    )
    for x in (k, v, index_k):
        x[outside] = cases.filled((128,), x.dtype, "nan") if x.dtype in cases.FP8 else float("nan")
    if seed % 3 == 1:
        k = cases.head_major(k)
    scales = {}
    if kept in cases.FP8 and kv not in cases.FP8 and seed % 2:
        scales = {
            "k_scale": torch.rand(heads, generator=generator) + 0.1,
            "v_scale": torch.rand(1, generator=generator) + 0.1,
        }
    if seed % 5 == 4:
        index_k = index_view = None
    else:
        index_view = index_cache[:, 0]
    tensors = {
        "k": k, "v": v, "index_k": index_k, "k_cache": k_cache, "v_cache": v_cache, "index_k_cache": index_view,
        "slot_mapping": slots,
    }  # fmt: skip
    want = dict(zip(("k_cache", "v_cache", "index_k_cache"), oracle.store_kv(*tensors.values(), **scales)))

    def check(found):
        for name, x in want.items():
            if x is not None:
                assert torch.equal(oracle.stored_bytes(found[name]), x), name

    arguments = {**tensors, **scales}
    return Problem(f"store_kv-{seed}-{layout}", m3_sparse.store_kv, arguments, tuple(want), check)


MERGE_DTYPES = ((FP32, FP32), (FP32, BF16), (FP32, FP16), (BF16, BF16), (FP16, FP16))


def merge(seed):
    """merge_states number `seed`: dead states are NaN, strides those of slices of wider tensors."""
    generator = cases.generator(seed)
    dtype, result = MERGE_DTYPES[seed % 5]
    shape = [(2, 3, 4), (5, 7, 3), (17, 2, 5), (1, 1, 1), (3, 33, 2), (40, 3, 1)][seed % 6]
    outs = torch.randn(*shape, 128, generator=generator).to(dtype)
    lses = torch.randn(*shape, generator=generator) * 8
    lses[torch.rand(shape, generator=generator) < 0.3] = float("-inf")
    lses[:, shape[1] // 2, shape[2] // 2] = float("-inf")
    outs[lses == float("-inf")] = float("nan")
    if seed % 2:
        wide = torch.full((shape[0], shape[1], shape[2] + 1, 128 + 16), float("nan"), dtype=dtype)
        wide[:, :, :-1, :128] = outs
        outs = wide[:, :, :-1, :128]
        lses = lses.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    want = oracle.merge_states(outs, lses)

    def check(found):
        oracle.check_attention(found["returned 0"], found["returned 1"], *want)

    return Problem(
        f"merge_states-{seed}", m3_sparse.merge_states, {"outs": outs, "lses": lses}, (), check, {"out_dtype": result}
    )


FORMULATIONS = (None, "decode", "union", "kv_stationary")


def problems(aot, count):
    """(name, what makes the problem) of about `count` seeds a kind; `aot`: with what only its operators can be told."""

    def listed(function, *options, seeds=count):
        for seed in range(seeds):
            for option in options:
                yield lambda s=seed, o=option: function(s, *o)

    formulations = FORMULATIONS if aot else (None,)
    few = max(2, count // 3)
    yield from listed(lambda s, f: attention("sparse_attention", s, f), *((f,) for f in formulations))
    yield from listed(
        lambda s, f: contiguous_attention("sparse_attention", s, f), *((f,) for f in formulations), seeds=few
    )
    yield from listed(lambda s: attention("dense_attention", s), ())
    yield from listed(lambda s: contiguous_attention("dense_attention", s), (), seeds=few)
    yield from listed(lambda s: selection("select_blocks", s), ())
    yield from listed(lambda s: selection("block_scores", s), (), seeds=few)
    if aot:
        yield from listed(lambda s, way: selection("select_blocks", s, way), (1,), (2,), (3,), seeds=few)
    for what in NOTHING:
        for f in formulations:
            if what != "no pages" or f in (None, "decode"):  # the others refuse a cache without pages
                yield lambda w=what, f=f: degenerate("sparse_attention", w, f)
        for function in ("dense_attention", "select_blocks", "block_scores"):
            if what != "no ids":
                yield lambda w=what, n=function: degenerate(n, w)
    yield from listed(store, ())
    yield from listed(merge, (), seeds=few)
