"""How far a result may be from the exact one: a bound that follows from the roundings it passes through, no tolerance.

Attention. With u the unit roundoff of a dtype (half the distance of neighbours at 1), p the exact weights and
S = max over the visible tokens of |softmax_scale k_scale| sum |q k| (what a logit's sum adds up, in absolute values),

    |out - exact| <= (n u(out) + c u(fp32) (1 + S)) sum p |v|  +  absolute
    |lse - exact| <=             c u(fp32) (1 + S + |exact|)

n counts the roundings to the width of the result, each of which moves a weight, or a sum of weights times values, by at
most u of itself:
    torch          1: the output; weights are fp32
    decode, union  2: the weights P, for the product with V; the output
    dense          2: the same
    kv_stationary  3: the weights; the partial result of each block, kept in 16 bits; the output
    merge          1: the output

c counts the roundings to fp32. A logit is a sum of 128 products.
    torch: 127 additions, in whatever order the matrix library takes, each rounded by at most u of the sum so far. That n
    such roundings exceed 4 sqrt(n) u has a probability below 10^-11 even if every partial sum is as large as the whole
    (n uniform errors of variance u^2 / 3: 7 standard deviations): 45. (127 would be certain.) A draw in which one product
    outweighs the others and comes first shows 16.
    aot: tensor cores add 16 products a step, 8 steps, truncated, which is worth two roundings: 16.
The scale takes two more, the difference to the reference and the exponential two. An error of a logit moves p and the sum
of p, so out twice as far. Sums of weights and of weighted values add one rounding for every step of 16 to 64 keys; over
thousands of keys these average out. torch 2 (45 + 5) = 100; aot 2 (16 + 4) + 8 = 48. Half of it for lse, where only one
side counts; merge has no products: 20.

SM100 makes some of the exponentials by a polynomial (dense on SM103 too; the decode kernel nowhere), which is off by up to e, the
largest relative error of its polynomial: EXP2. Weights and their sum have it each: 2 e sum p |v| more for out, e for lse.

absolute is what no multiple of u covers. fp16 ends at 2^-24: a weight (at least 1 at the row's maximum) below it is lost,
2^-25 |v| a token; likewise an output. kv_stationary takes weights and partial results 2^-7 smaller, so that no sum of them
overflows, in which 2^-18 |v| a token and 2^-18 a block are lost: its fp16 has less room for weights far below the largest
than that of the other formulations. fp32 ends at 2^-126 for units that flush: 2^-125 |v| a token.

Scores. |score - exact| <= c u(fp32) max over visible t of sum |iq ik|, c as for a logit: 45 on torch, 16 + 4 on aot. Two
float8 operands are multiplied by tensor cores that align the 32 products of a step and the sum so far to the largest of them
and keep 14 bits: 4 steps of 33 numbers, each truncated by less than 2^-13 of the whole: c u(fp32) = 2^-6, which is certain
and seldom near (an H200 came to 2^-8.5 in 667 draws). 16-bit queries have their float8 keys widened instead.

Selection. Exactly what the returned scores demand; against the exact scores, one block may stand for another only if
their exact scores are at most two such bounds apart.

store_kv: the exact bytes.
"""

import typing

import oracle
import property_settings
import torch

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
UNIT = {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 2.0**-24}


class Bound(typing.NamedTuple):
    rounded: int  # n: roundings to the width of the result
    summed: int  # c: roundings to fp32
    summed_lse: int


BOUNDS = {
    "torch": Bound(1, 100, 50),
    "decode": Bound(2, 48, 24),
    "union": Bound(2, 48, 24),
    "kv_stationary": Bound(3, 48, 24),
    "dense": Bound(2, 48, 24),
    "merge": Bound(1, 20, 20),
}
# Largest relative error of the polynomial of a kernel: of dense; of KV-stationary by the dtype of the query; of union by that of
# the products, fp16 for float8 caches.
EXP2 = {"dense": 7.5e-5, BF16: 7.5e-5, FP16: 2.7e-6}
POLYNOMIAL = {"sm_100": ("dense", "kv_stationary", "union"), "sm_103": ("dense",)}
SCORES = {"torch": 45, "aot": 20}
SCORES_OF_FLOAT8 = 2.0**-6 / UNIT[FP32]


def _within(op, backend, what, got, want, allowed, most=None):
    """Equal, infinities and NaN included, or |got - want| <= allowed; keeps the largest share of the bound seen."""
    got, want = got.detach().double(), want.detach().double()
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    same = (got == want) | (got.isnan() & want.isnan())
    if most is not None:  # infinity for what the dtype doesn't hold
        same |= got.isinf() & (got.sign() == want.sign()) & (want.abs() + allowed >= most)
    error = torch.where(same, 0.0, (got - want).abs())
    bad = ~same & ~(error <= allowed)
    if bad.any():
        at = tuple(bad.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {int(bad.sum())} of {bad.numel()} out of bounds, first at {at}: {got[at]:.9g}, exact {want[at]:.9g}, "
            f"{error[at] / allowed[at]:.3g} of the bound"
        )
    if error.numel():
        property_settings.ratio(op, backend, what, torch.where(error > 0, error / allowed, 0.0).max())


def exp2_error(kind, architecture, q_dtype, v_dtype):
    if kind not in POLYNOMIAL.get(architecture, ()):
        return 0.0
    if kind == "dense":
        return EXP2["dense"]
    return EXP2[v_dtype if kind == "union" and v_dtype == BF16 else FP16 if kind == "union" else q_dtype]


def attention(op, backend, kind, out, lse, exact, v_dtype, blocks=32, architecture=None):
    """`kind`: a key of BOUNDS. `exact`: oracle.Attended. `blocks`: most partial results of a row."""
    bound, exp2 = BOUNDS[kind], exp2_error(kind, architecture, out.dtype, v_dtype)
    unit, single = UNIT[out.dtype], UNIT[FP32]
    allowed = (bound.rounded * unit + 2 * exp2 + bound.summed * single * (1 + exact.reach[..., None])) * exact.weighed
    allowed = allowed + 1e-37 + 2.0**-125 * exact.mass
    if out.dtype == FP16:
        allowed = allowed + 2.0**-25
    if kind not in ("torch", "merge") and (out.dtype == FP16 or v_dtype.itemsize == 1):
        allowed = allowed + 2.0**-25 * exact.mass
    if kind == "kv_stationary" and out.dtype == FP16:
        allowed = allowed + 2.0**-18 * (exact.mass + blocks)
    label = f"{kind} {str(out.dtype)[6:]}+{str(v_dtype)[6:]}"
    _within(op, backend, f"out, {label}", out, exact.out, allowed, torch.finfo(out.dtype).max)
    if lse is not None:
        assert lse.dtype == FP32, f"lse: dtype {lse.dtype}"
        size = torch.where(exact.lse.isfinite(), exact.lse.abs(), 0)
        allowed = exp2 + bound.summed_lse * single * (1 + exact.reach + size)
        _within(op, backend, f"lse, {label}", lse, exact.lse, allowed)


def scores(op, backend, got, want, sizes, query_dtype, key_dtype):
    """Returns the bound, for each score."""
    both = query_dtype.itemsize == 1 and backend != "torch"
    constant = SCORES_OF_FLOAT8 if both else SCORES["torch" if backend == "torch" else "aot"]
    allowed = constant * UNIT[FP32] * sizes + 1e-37
    assert not got.isnan().any(), "a score is NaN"
    _within(op, backend, f"scores, {str(query_dtype)[6:]}+{str(key_dtype)[6:]}", got, want, allowed)
    return allowed


def selection(ids, want_scores, allowed, counts, **rules):
    """Count, order, uniqueness and forced ids exact; members within twice the bound of a row's scores."""
    epsilon = 2 * torch.nn.functional.pad(allowed, (1, 0)).amax(-1)
    oracle.check_selection(ids, want_scores, epsilon, counts, **rules)
