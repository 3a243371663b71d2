"""Softmax in pieces whose merge loses nothing: every piece is scaled by a power of two.

A piece of a row (some of its keys) is kept as
    m            a multiple of 8 (held in fp32), 0 to 8 below the largest logit of the piece in log2 units
    l            sum of p,      p = 2^(logit - m), so the largest p is in (1, 256]: far from the ends of fp16
    o            sum of p * v
and two pieces merge to the larger m with o = o_a 2^(m_a - m) + o_b 2^(m_b - m). Both factors are powers of two, so
scaling is exact (in fp32, as long as nothing falls below 2^-126) and the one rounding is that of the sum. What a sum
over pieces gives thus depends on the order of its terms alone: not on when the running maximum grew, nor on which
warp or CTA merged. A kernel that fixes the order of its terms gets the same bits however it splits the work. Coarse
references rarely differ between the pieces of a row, and then there is nothing to scale.

A piece with nothing visible has m = EMPTY, l = 0, o = 0.

A logit scale that is NaN or infinite makes NaN of every row that sees something and leaves empty rows empty: kernels take
visible logits for NaN, -inf stays what is masked, and what scales both is finite.
"""

from cutlass import Float32

from shared import ptx

LOG2_E, LN_2 = 1.4426950408889634, 0.6931471805599453
NEG_INF = float("-inf")
STEP = 8.0  # of references
EMPTY = -1.0e38  # finite, so that differences of two of them are not NaN
LARGEST = 3.4028234663852886e38  # finite
SMALLEST = 1.1754943508222875e-38  # stands for a factor 0: -inf * 0 would be NaN
NAN_PAIR = 0x7FFF7FFF  # two 16-bit numbers, NaN in bf16 and in fp16
SHIFT = 12582912.0 + 127.0  # 1.5 * 2^23 + bias: adding it to an integer leaves exponent bits at the bottom of the word


def is_finite(x):
    return ptx.absolute(x) <= Float32(LARGEST)


def finite_or_nan(scale):
    """NaN for an infinite scale, so that one comparison finds both."""
    return ptx.select(is_finite(scale), scale, Float32(float("nan")))


def sign_of(scale):
    """What logits are multiplied by, `finite_or_nan` of their scale given: 1, or -1, or NaN."""
    return ptx.select(scale >= Float32(0.0), Float32(1.0), ptx.select(scale < Float32(0.0), Float32(-1.0), scale))


def power_of_two(difference):
    """2^difference for an integer <= 0, exactly; 0 below 2^-126. NaN gives 0."""
    bits = ptx.f32_bits(ptx.maximum(difference, Float32(-127.0)) + Float32(SHIFT))
    return ptx.f32_from_bits(bits << 23)


def row_maximum(values):
    """Over `values` and the four lanes that share a row of a C fragment."""
    top = values
    while len(top) > 1:
        top = [ptx.maximum(top[i], top[i + 1]) if i + 1 < len(top) else top[i] for i in range(0, len(top), 2)]
    top = ptx.maximum(top[0], ptx.shuffle_xor_f32(top[0], 1))
    return ptx.maximum(top, ptx.shuffle_xor_f32(top, 2))


def tree_sum(values):
    while len(values) > 1:
        values = [values[i] + values[i + 1] if i + 1 < len(values) else values[i] for i in range(0, len(values), 2)]
    return values[0]


def piece(logits, scale):
    """Of one row: the reference m, the p's and this lane's share of l. `scale` > 0 takes logits to log2 units."""
    steps = ptx.ceiling(ptx.fma(row_maximum(logits), scale * Float32(1.0 / STEP), Float32(-1.0)))
    m = ptx.maximum(ptx.multiply(steps, Float32(STEP)), Float32(EMPTY))
    p = [ptx.exp2(ptx.fma(x, scale, -m)) for x in logits]
    return m, p, tree_sum(p)


def weights(ms):
    """The common reference of pieces with references `ms`, and the factor of each."""
    top = ms[0]
    for m in ms[1:]:
        top = ptx.maximum(top, m)
    return top, [power_of_two(m - top) for m in ms]


def weighted_sum(values, factors):
    """In the order given. Same bits as merging one after the other."""
    total = ptx.multiply(values[0], factors[0])
    for value, factor in zip(values[1:], factors[1:]):
        total = ptx.fma(value, factor, total)
    return total


def natural_lse(m, l):
    """Natural logarithm of l * 2^m; -inf for an empty row."""
    return ptx.select(l == Float32(0.0), Float32(NEG_INF), (m + ptx.log2(l)) * Float32(LN_2))


def output_factor(l, v_scale):
    """Of a row's o: v_scale / l; 0 for an empty row, whatever the scale is, NaN and infinity included."""
    return ptx.select(l == Float32(0.0), Float32(0.0), ptx.multiply(ptx.reciprocal(l), v_scale))
