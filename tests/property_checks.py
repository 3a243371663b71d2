"""Runs a drawn call on a backend and judges the result: one function an operation, the same for every backend."""

import field_helpers
import oracle
import property_bounds as bounds
import property_settings
import pytest
import torch

import m3_sparse

INF = float("inf")


def refused(arguments):
    """Whether float8 queries come with a stride of 0, which the aot backend takes for no scoring."""
    query, keys = arguments["index_q"], arguments["index_k_cache"]
    expanded = any(n > 1 and s == 0 for x in (query, keys) for n, s in zip(x.shape, x.stride()))
    return query.dtype.itemsize == 1 and expanded


class Device:
    """A backend of the package (`name`), what it is called in the figures, where its tensors are, and on which architecture
    the AOT kernels run, if it is them."""

    def __init__(self, name, label, device="cpu", architecture=None):
        self.name, self.label, self.device, self.architecture = name, label, device, architecture

    def by_default(self):
        """The backend that the package chooses, for a call that this one refuses."""
        return Device(None, self.label, self.device, self.architecture)

    def put(self, move, x):
        return [move(y) for y in x] if isinstance(x, list) else move(x)

    def call(self, function, arguments):
        """The function's result, on the device; `arguments` may share buffers, and do so there too."""
        move = field_helpers.mover(self.device)
        placed = {name: self.put(move, x) for name, x in arguments.items()}
        with m3_sparse.backend(self.name):
            return function(**placed), placed


def _untouched(view, buffer, what):
    """Nothing of the buffer behind a result changed but the result."""
    if view is buffer:
        return
    marked = buffer.clone()
    mask = torch.zeros(buffer.shape, dtype=torch.bool)
    mask.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(True)
    rest = oracle.stored_bytes(marked[~mask])
    fill = 0x7F if buffer.dtype != torch.float32 or what == "out" else None
    if fill is None:
        assert marked[~mask].isnan().all(), f"bytes beside {what} were written"
    else:
        assert (rest == fill).all(), f"bytes beside {what} were written"


def _without_spoilt(out, exact, v_scale, heads):
    """No element is finite in rows that see something through a v_scale that is not; they are judged by that alone, and
    returned as 0."""
    bad = ~v_scale.flatten().isfinite().expand(heads)
    spoilt = bad.repeat_interleave(out.shape[1] // heads) & (exact.lse != -INF)
    assert not out.cpu()[spoilt].isfinite().any(), "a finite result through a v_scale that is not"
    at = spoilt[..., None]
    out = out.cpu().masked_fill(at, 0)
    sizes = {name: getattr(exact, name).masked_fill(at, 0) for name in ("out", "weighed", "mass")}
    return out, exact._replace(**sizes)


def attention(device, call, dense=False):
    op = "dense_attention" if dense else "sparse_attention"
    story, arguments = call.story, dict(call.arguments)
    property_settings.count(op, device.label, calls=1, examples=1)
    for name in ("out", "lse"):
        if story[name] is not None:
            arguments[name] = story[name]
    arguments["return_lse"] = story["return_lse"]
    formulation = story.get("formulation")
    if formulation is not None:
        arguments["formulation"] = formulation
    try:
        result, placed = device.call(getattr(m3_sparse, op), arguments)
    except NotImplementedError:
        # A formulation asked for by name may refuse caches that are expanded; the default must not.
        if formulation is None or all(s for s in (*arguments["k_cache"].stride(), *arguments["v_cache"].stride())):
            raise
        formulation = None
        del arguments["formulation"]
        result, placed = device.call(getattr(m3_sparse, op), arguments)
    out, lse = result if story["return_lse"] else (result, placed.get("lse"))
    for name, got in (("out", out), ("lse", lse)):
        if story[name] is not None:
            assert got is placed[name], f"{name} given, another one returned"
    if device.device == "cpu":
        for view, buffer in story["buffers"]:
            _untouched(view, buffer, "lse" if view.dim() == 2 else "out")
    exact = getattr(oracle, op)(*call.exact, **call.named, sizes=True)
    kind = "torch" if device.name == "torch" else "dense" if dense else formulation or "kv_stationary"
    v_scale = call.arguments.get("v_scale")
    factor = 1.0
    if v_scale is not None and v_scale.numel():
        factor = float(v_scale.abs().nan_to_num(1, 1, 1).max())
        out, exact = _without_spoilt(out, exact, v_scale, arguments["k_cache"].shape[1])
    bounds.attention(
        op,
        device.label,
        kind,
        out.cpu(),
        None if lse is None else lse.cpu(),
        exact,
        arguments["v_cache"].dtype,
        32 * factor,
        device.architecture,
    )


def scores(device, call):
    property_settings.count("block_scores", device.label, calls=1, examples=1)
    if device.name == "aot" and refused(call.arguments):
        with pytest.raises(NotImplementedError, match="strides above 0"):
            device.call(m3_sparse.block_scores, call.arguments)
        device = device.by_default()
    got, _ = device.call(m3_sparse.block_scores, call.arguments)
    query, keys, _ = call.exact
    assert got.dtype == torch.float32 and got.shape[2] == call.story["blocks"]
    want, sizes = (_at_least(f(*call.exact, **call.named), got) for f in (oracle.block_scores, oracle.score_sizes))
    sizes = torch.where(want.isinf() & (want < 0) & (sizes < 0), 0, sizes)
    bounds.scores("block_scores", device.label, got.cpu(), want, sizes, query.dtype, keys.dtype)


def _at_least(exact, got):
    """The oracle's scores with the number of columns of `got`: those of a contiguous cache without a block differ."""
    return exact[..., : got.shape[2]]


def selection(device, call):
    property_settings.count("select_blocks", device.label, calls=2, examples=1)
    arguments = dict(call.arguments)
    if device.name == "aot" and refused(arguments):
        with pytest.raises(NotImplementedError, match="strides above 0"):
            device.call(m3_sparse.select_blocks, arguments)
        device = device.by_default()
    (ids, got), _ = device.call(m3_sparse.select_blocks, {**arguments, "return_scores": True})
    if call.story["out"] is not None:
        arguments["out"] = call.story["out"]
    alone, placed = device.call(m3_sparse.select_blocks, arguments)
    if call.story["out"] is not None:
        assert alone is placed["out"]
        if device.device == "cpu":
            count = (call.story["buffer"] == 77).sum()
            assert count == call.story["buffer"].numel() - alone.numel(), (
                "ids beside out were written, or of out weren't"
            )
    ids, got = ids.cpu(), got.cpu()
    assert torch.equal(ids, alone.cpu()), "the selection depends on whether scores are returned"
    query, keys, table = call.exact
    want, sizes = (_at_least(f(*call.exact, **call.named), got) for f in (oracle.block_scores, oracle.score_sizes))
    allowed = bounds.scores("select_blocks", device.label, got, want, sizes, query.dtype, keys.dtype)
    named = call.named
    counts = oracle.candidates(named["cu_seqlens_q"], named["seqused_k"], table, keys.shape[1], len(query))
    rules = {"topk": arguments["topk"], "local": arguments["local_blocks"], "init": arguments["init_blocks"]}
    assert torch.equal(ids, oracle.select(got.double(), counts, **rules)), "not what the returned scores demand"
    bounds.selection(ids, want, allowed, counts, **rules)


def store(device, call):
    property_settings.count("store_kv", device.label, calls=1, examples=1)
    arguments = call.arguments
    want = oracle.store_kv(**arguments)
    _, placed = device.call(m3_sparse.store_kv, arguments)
    for cache, expected, name in zip(_caches(placed), want, ("k", "v", "index_k")):
        if cache is None:
            continue
        got = oracle.stored_bytes(cache.cpu())
        if arguments[name].dtype != cache.dtype:  # a NaN that was converted may have either sign, and any bits of one
            both = [x.view(cache.dtype).float().isnan() for x in (got, expected)]
            got = torch.where(both[0] & both[1], expected, got)
        assert torch.equal(got, expected), f"{name}_cache differs"


def _caches(arguments):
    return [arguments[name] for name in ("k_cache", "v_cache", "index_k_cache")]


def merge(device, call):
    property_settings.count("merge_states", device.label, calls=1, examples=1)
    (out, lse), _ = device.call(m3_sparse.merge_states, call.arguments)
    exact = oracle.merge_states(*call.exact, sizes=True)
    assert out.dtype == (call.arguments["out_dtype"] or call.exact[0].dtype)
    bounds.attention("merge_states", device.label, "merge", out.cpu(), lse.cpu(), exact, call.exact[0].dtype)
