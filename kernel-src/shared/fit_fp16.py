"""A bf16 row as fp16: times a power of two that makes its largest element fit, so that fp8 keys, which are fp16 numbers,
can be multiplied with it. Elements under 2^-31 of the largest lose bits: 2^-40 of it at most.
"""

from cutlass import Int32

from shared import ptx


def fit(words, distances=(1, 2)):
    """(fp16 pairs, what undoes the factor) of bf16 pairs; the row is spread over four neighbouring threads, or over those at
    other distances."""
    largest = Int32(0)
    for w in words:
        for magnitude in (w & 0x7FFF, (w >> 16) & 0x7FFF):
            finite = ptx.select(magnitude < 0x7F80, magnitude, Int32(0))
            largest = ptx.select(finite > largest, finite, largest)
    for distance in distances:
        other = ptx.shuffle_xor(largest, distance)
        largest = ptx.select(other > largest, other, largest)
    # The largest element becomes 2^14 .. 2^15, unless it is so small that the factor would leave fp32.
    exponent = ptx.minimum_i32(Int32(141) - (largest >> 7), Int32(126))
    factor = ptx.f32_from_bits((exponent + 127) << 23)
    pairs = []
    for w in words:
        low, high = ptx.unpack_bf16(w)
        pairs.append(ptx.pack_fp16(low * factor, high * factor))
    return pairs, ptx.f32_from_bits((Int32(127) - exponent) << 23)
