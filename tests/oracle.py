"""A deliberately naive float64 oracle for every public function, and the rules by which results are judged.

It shares no code with the package. Paged caches are read entry by entry, in plain loops over requests, rows and heads,
so that each line can be compared with a sentence of the contract; a byte that the contract does not let a row see is
never touched here, whatever it holds. Everything is torch float64, so gradients can be taken through the attentions.
"""

import itertools
import math
import typing

import numpy as np
import torch

BLOCK = 128
INF = math.inf


def requests(cu_seqlens_q, seqused_k, block_table, page):
    """Yield (b, first row, q_len, kv_len); kv_len is clamped to what the table can reach, and is never negative."""
    cu, used = cu_seqlens_q.tolist(), seqused_k.tolist()
    reach = block_table.shape[1] * page
    for b in range(len(used)):
        yield b, cu[b], cu[b + 1] - cu[b], max(0, min(used[b], reach))


def read_block(cache, table_row, head, block, end):
    """Visible tokens t < end of one block as float64 [n, 128]; a page outside the cache contributes nothing."""
    pages, page = cache.shape[0], cache.shape[2]
    parts = []
    for first in range(block * BLOCK, (block + 1) * BLOCK, page):
        count = min(page, end - first)
        if count <= 0:
            continue
        number = table_row[first // page]
        if 0 <= number < pages:
            parts.append(cache[number, head, :count].double())
    return torch.cat(parts) if parts else torch.zeros(0, cache.shape[3], dtype=torch.float64)


# ---------------------------------------------------------------------------------------------------------- selection


def _score_rows(index_q, index_k_cache, block_table, cu_seqlens_q, seqused_k, reduce):
    page = index_k_cache.shape[1]
    cache = index_k_cache[:, None]
    width = -(-block_table.shape[1] * page // BLOCK)
    rows = torch.full((index_q.shape[0], index_q.shape[1], width), -INF, dtype=torch.float64)
    for b, start, q_len, kv_len in requests(cu_seqlens_q, seqused_k, block_table, page):
        table_row = block_table[b].tolist()
        for i in range(q_len):
            qpos = kv_len - q_len + i
            for block in range(qpos // BLOCK + 1):
                keys = read_block(cache, table_row, 0, block, qpos + 1)
                if len(keys):
                    rows[start + i, :, block] = reduce(index_q[start + i].double(), keys)
    return rows


def block_scores(index_q, index_k_cache, block_table, *, cu_seqlens_q, seqused_k):
    """max over visible t of dot(iq, ik[t]), unscaled; a NaN dot counts as -inf, a block with none visible is -inf."""

    def best(query, keys):
        dots = query @ keys.T
        return torch.where(dots.isnan(), -INF, dots).amax(1)

    return _score_rows(index_q, index_k_cache, block_table, cu_seqlens_q, seqused_k, best)


def score_sizes(index_q, index_k_cache, block_table, *, cu_seqlens_q, seqused_k):
    """max over visible t of sum |iq * ik|, per row, head and block, of the finite dot products; 0 where there is none."""

    def largest(query, keys):
        sizes = query.abs() @ keys.nan_to_num(0, 0, 0).abs().T
        return torch.where((query @ keys.T).isfinite(), sizes, 0).amax(1)

    sizes = _score_rows(index_q, index_k_cache, block_table, cu_seqlens_q, seqused_k, largest)
    return sizes.clamp_min(0)


def score_epsilon(index_q, index_k_cache, block_table, *, cu_seqlens_q, seqused_k):
    """2**-16 * max over visible t of sum |iq * ik|, per row and head: how far two scores may be apart in a swap."""
    lengths = {"cu_seqlens_q": cu_seqlens_q, "seqused_k": seqused_k}
    sizes = score_sizes(index_q, index_k_cache, block_table, **lengths)
    return (torch.nn.functional.pad(sizes, (1, 0)).amax(-1)) * 2.0**-16


def candidates(cu_seqlens_q, seqused_k, block_table, page, total_q):
    """Number of candidate blocks of each row (0 where there is none)."""
    counts = [0] * total_q
    for _, start, q_len, kv_len in requests(cu_seqlens_q, seqused_k, block_table, page):
        for i in range(q_len):
            counts[start + i] = max(0, (kv_len - q_len + i) // BLOCK + 1)
    return counts


def forced_blocks(n, local, init):
    return set(range(max(0, n - local), n)) | set(range(min(init, n)))


def select(scores, counts, topk=16, local=1, init=0):
    """Forced blocks, then the best by (score descending, id ascending); int32, ascending, then -1."""
    rows, heads, _ = scores.shape
    out = torch.full((rows, heads, topk), -1, dtype=torch.int32)
    for i in range(rows):
        n = counts[i]
        forced = forced_blocks(n, local, init)
        for h in range(heads):
            row = [-INF if math.isnan(s) else s for s in scores[i, h].tolist()]
            free = sorted((b for b in range(n) if b not in forced), key=lambda b: (-row[b], b))
            ids = sorted(forced | set(free[: topk - len(forced)]))
            for slot, block in enumerate(ids):
                out[i, h, slot] = block
    return out


def check_selection(got, scores, epsilon, counts, topk=16, local=1, init=0):
    """Exact count, order, uniqueness and forced ids; members may differ from the oracle's only within epsilon."""
    want = select(scores, counts, topk, local, init)
    for i in range(got.shape[0]):
        n = counts[i]
        forced = forced_blocks(n, local, init)
        for h in range(got.shape[1]):
            ids = got[i, h].tolist()
            chosen = [b for b in ids if b != -1]
            at = f"row {i} head {h}: {ids}, oracle {want[i, h].tolist()}"
            assert len(chosen) == min(topk, n) and ids[len(chosen) :] == [-1] * (topk - len(chosen)), at
            assert all(a < b for a, b in itertools.pairwise(chosen)) and all(0 <= b < n for b in chosen), at
            assert forced <= set(chosen), at
            wanted = set(want[i, h].tolist()) - {-1}
            row = scores[i, h].tolist()
            for extra in set(chosen) - wanted:
                for missed in wanted - set(chosen):
                    assert row[missed] - row[extra] <= float(epsilon[i, h]), (
                        f"{at}: took {extra} ({row[extra]}) instead of {missed} ({row[missed]}), eps {epsilon[i, h]}"
                    )


# ---------------------------------------------------------------------------------------------------------- attention


def _scale_of(scale, head):
    if scale is None:
        return 1.0
    flat = scale.double().flatten()
    return flat[head if flat.numel() > 1 else 0]


class Attended(typing.NamedTuple):
    """The exact result, and the sizes of what was added up, by which an error is judged (property_bounds.py)."""

    out: torch.Tensor  # [T, Hq, 128]
    lse: torch.Tensor  # [T, Hq]
    weighed: torch.Tensor  # sum of p |v|, like out
    mass: torch.Tensor  # sum of |v| over what the row sees, like out
    reach: torch.Tensor  # max over what the row sees of |softmax_scale| sum |q k|, like lse; 0 for an empty row


def _attention(
    q, k_cache, v_cache, rows_to_blocks, block_table, cu_seqlens_q, seqused_k, softmax_scale, causal, k_scale, v_scale
):
    total_q, q_heads, dim = q.shape
    kv_heads, page = k_cache.shape[1], k_cache.shape[2]
    group = q_heads // kv_heads
    softmax_scale = 1 / math.sqrt(dim) if softmax_scale is None else softmax_scale
    none = torch.zeros(group, dim, dtype=torch.float64), torch.zeros(group, dtype=torch.float64)
    empty = Attended(none[0], none[1] - INF, none[0], none[0], none[1])
    answer = [[empty] * kv_heads for _ in range(total_q)]
    for b, start, q_len, kv_len in requests(cu_seqlens_q, seqused_k, block_table, page):
        table_row = block_table[b].tolist()
        for i in range(q_len):
            row = start + i
            end = kv_len - q_len + i + 1 if causal else kv_len
            for kv_head in range(kv_heads):
                blocks = sorted({x for x in rows_to_blocks(row, kv_head, end) if 0 <= x * BLOCK < end})
                keys = [read_block(k_cache, table_row, kv_head, x, end) for x in blocks]
                values = [read_block(v_cache, table_row, kv_head, x, end) for x in blocks]
                if sum(map(len, keys)) == 0:
                    continue
                of_keys = _scale_of(k_scale, kv_head)
                if not math.isfinite(of_keys * softmax_scale):
                    of_keys = math.nan
                keys = torch.cat(keys) * of_keys
                values = torch.cat(values) * _scale_of(v_scale, kv_head)
                query = q[row, kv_head * group : (kv_head + 1) * group].double()
                logits = query @ keys.T * softmax_scale
                lse = torch.logsumexp(logits, 1)
                weight = torch.exp(logits - lse[:, None])
                with torch.no_grad():
                    size = values.abs()
                    reach = (query.abs() @ keys.abs().T).amax(1) * abs(softmax_scale)
                    sizes = weight @ size, size.sum(0).expand(group, dim), reach
                answer[row][kv_head] = Attended(weight @ values, lse, *sizes)
    if total_q * q_heads == 0:
        wide, narrow = torch.zeros(total_q, q_heads, dim).double(), torch.zeros(total_q, q_heads).double()
        return Attended(wide, narrow, wide, wide, narrow)
    rows = [Attended(*(torch.cat(heads) for heads in zip(*row))) for row in answer]
    return Attended(*(torch.stack(field) for field in zip(*rows)))


def sparse_attention(
    q,
    k_cache,
    v_cache,
    block_indices,
    block_table,
    *,
    cu_seqlens_q,
    seqused_k,
    softmax_scale=None,
    causal=True,
    k_scale=None,
    v_scale=None,
    sizes=False,
):
    """Softmax over the union of the visible tokens of exactly the given blocks -> (out, lse), both float64; with
    `sizes` all of Attended."""
    ids = block_indices.tolist()
    found = _attention(
        q,
        k_cache,
        v_cache,
        lambda row, head, end: ids[row][head],
        block_table,
        cu_seqlens_q,
        seqused_k,
        softmax_scale,
        causal,
        k_scale,
        v_scale,
    )
    return found if sizes else found[:2]


def dense_attention(
    q,
    k_cache,
    v_cache,
    block_table,
    *,
    cu_seqlens_q,
    seqused_k,
    softmax_scale=None,
    causal=True,
    k_scale=None,
    v_scale=None,
    sizes=False,
):
    """The same over every block."""
    found = _attention(
        q,
        k_cache,
        v_cache,
        lambda row, head, end: range(-(-end // BLOCK)),
        block_table,
        cu_seqlens_q,
        seqused_k,
        softmax_scale,
        causal,
        k_scale,
        v_scale,
    )
    return found if sizes else found[:2]


def merge_states(outs, lses, sizes=False):
    """[N,T,H,D], [N,T,H] -> (out, lse): weights exp(lse_n - L); a state of lse -inf contributes nothing, NaN or not.
    With `sizes` all of Attended, where the states take the place of tokens, and |lse_n - L| that of |q k|."""
    parts, rows, heads, dim = outs.shape
    out = torch.zeros(rows, heads, dim, dtype=torch.float64)
    weighed, mass = torch.zeros_like(out), torch.zeros_like(out)
    lse = torch.full((rows, heads), -INF, dtype=torch.float64)
    reach = torch.zeros_like(lse)
    for t in range(rows):
        for h in range(heads):
            alive = [n for n in range(parts) if lses[n, t, h].item() != -INF]
            if not alive:
                continue
            logs = lses[alive, t, h].double()
            lse[t, h] = torch.logsumexp(logs, 0)
            states = outs[alive, t, h].double()
            out[t, h] = torch.softmax(logs, 0) @ states
            weighed[t, h], mass[t, h] = torch.softmax(logs, 0) @ states.abs(), states.abs().sum(0)
            reach[t, h] = (logs - lse[t, h]).abs().amax()
            if not math.isfinite(lse[t, h].item()):
                out[t, h] = lse[t, h] = math.nan
    return Attended(out, lse, weighed, mass, reach) if sizes else (out, lse)


# -------------------------------------------------------------------------------------------------------------- cache


def fp8_values(dtype):
    """The 256 values of an fp8 format, from its bit layout."""
    exp_bits, bias = {torch.float8_e4m3fn: (4, 7), torch.float8_e5m2: (5, 15)}[dtype]
    man_bits = 7 - exp_bits
    values = np.empty(256)
    for code in range(256):
        exponent, mantissa = (code & 127) >> man_bits, code & (2**man_bits - 1)
        if dtype == torch.float8_e4m3fn and code & 127 == 127:
            value = math.nan
        elif dtype == torch.float8_e5m2 and exponent == 31:
            value = math.inf if mantissa == 0 else math.nan
        elif exponent == 0:
            value = mantissa * 2.0 ** (1 - bias - man_bits)
        else:
            value = (1 + mantissa / 2**man_bits) * 2.0 ** (exponent - bias)
        values[code] = -value if code & 128 else value
    return values


def fp8_encode(x, scale, dtype):
    """bytes of fp8(clamp(float32(x) / scale)): nearest value, ties to the even code, saturating; NaN stays NaN."""
    values = fp8_values(dtype)
    positive = values[:127] if dtype == torch.float8_e4m3fn else values[:124]
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        scaled = x.float().numpy() / np.float32(scale)
    magnitude = np.minimum(np.abs(scaled.astype(np.float64)), positive[-1])
    above = np.searchsorted(positive, np.where(np.isnan(magnitude), 0, magnitude))
    below = np.maximum(above - 1, 0)
    up, down = positive[above] - magnitude, magnitude - positive[below]
    code = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below) | np.where(
        np.signbit(scaled), 128, 0
    )
    codes = np.where(np.isnan(scaled), 127, code).astype(np.uint8)
    return torch.from_numpy(codes)


def store_kv(k, v, index_k, k_cache, v_cache, index_k_cache, slot_mapping, *, k_scale=None, v_scale=None):
    """The bytes that each cache must hold afterwards: three uint8 tensors [..., 128 * itemsize] (None for no index)."""
    results = []
    for source, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale), (index_k, index_k_cache, None)):
        if cache is None:
            results.append(None)
            continue
        if cache.dim() == 3:
            source, cache = source[:, None], cache[:, None]
        after = stored_bytes(cache)
        pages, heads, page = cache.shape[:3]
        for token, slot in enumerate(slot_mapping.tolist()):
            if not 0 <= slot < pages * page:
                continue
            for head in range(heads):
                row = source[token, head]
                if cache.dtype.itemsize == 1 and source.dtype != cache.dtype:
                    new = fp8_encode(row, float(_scale_of(scale, head)), cache.dtype)
                else:
                    new = row.to(cache.dtype).contiguous().view(torch.uint8)
                after[slot // page, head, slot % page] = new
        results.append(after if cache is k_cache or cache is v_cache else after[:, 0])
    return results


def stored_bytes(cache):
    """A contiguous copy of a (strided) cache's bytes."""
    return cache.contiguous().view(torch.uint8).clone()


# --------------------------------------------------------------------------------------------------- tolerance protocol

# dtype -> (absolute, relative, relative L2 over all, relative L2 of any one row, LSE)
TOLERANCE = {
    torch.float32: (1e-5, 1e-5, 1e-5, 2e-5, 1e-5),
    torch.bfloat16: (2e-2, 2e-2, 5e-3, 1e-2, 1e-3),
    torch.float16: (2e-2, 2e-2, 5e-3, 1e-2, 1e-3),
}


def check_close(got, want, absolute, relative, what):
    """Equal infinities and NaN positions, |got - want| <= absolute + relative * |want|; names the first offender."""
    got, want = got.detach().double(), want.detach().double()
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    same = (got == want) | (got.isnan() & want.isnan())
    bad = ~(same | ((got - want).abs() <= absolute + relative * want.abs()))
    bad |= ~same & (got.isinf() | want.isinf() | want.isnan() | got.isnan())
    if bad.any():
        at = tuple(bad.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {int(bad.sum())} of {bad.numel()} differ, first at {at}: {got[at]} != {want[at]}"
        )


def check_attention(out, lse, want, want_lse, dtype=None):
    """Judge attention output (and LSE unless None) of a given dtype against the oracle."""
    absolute, relative, l2, row_l2, log = TOLERANCE[dtype or out.dtype]
    check_close(out, want, absolute, relative, "out")
    error, size = (out.detach().double() - want.detach()), want.detach()
    if out.numel():
        assert error.norm() <= l2 * size.norm(), f"out: relative L2 {float(error.norm() / size.norm()):.3g} > {l2}"
        worst = (error.norm(dim=-1) - row_l2 * size.norm(dim=-1)).amax()
        assert worst <= 1e-6, f"out: a row's L2 error exceeds {row_l2} of its norm by {float(worst):.3g}"
    if lse is not None:
        assert lse.dtype == torch.float32, f"lse: dtype {lse.dtype}"
        check_close(lse, want_lse, log, log, "lse")


def check_bitwise(got, want, what):
    """Equal bytes (NaN equals the same NaN); names the first differing coordinate."""
    assert (got.dtype, got.shape) == (want.dtype, want.shape), (
        f"{what}: {got.dtype} {got.shape}, {want.dtype} {want.shape}"
    )
    differ = (stored_bytes(got) != stored_bytes(want)).view(*got.shape, got.dtype.itemsize).any(-1)
    if differ.any():
        at = tuple(differ.nonzero()[0].tolist())
        raise AssertionError(f"{what}: {int(differ.sum())} differ in bits, first at {at}: {got[at]} != {want[at]}")
