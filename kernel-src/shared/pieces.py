"""Packed query tokens cut into pieces: the tokens of one sequence within an aligned span of 2^bits tokens.

With span i and sequence b (0 .. B; B stands for the tokens past the last sequence) the piece has the number i + b. Along
the packed tokens either i or b grows from piece to piece, so numbers are unique, ascend, and stay below
ceil(T / 2^bits) + B, whatever the lengths are: a grid can be sized by shapes alone. Numbers that a sequence with no token
leaves out are empty pieces.

Offsets are data that may be wrong. Whatever they hold, a piece lies within its span and within the T tokens.
"""

import cutlass.cute as cute
from cutlass import Int32, Int64

from shared import ptx


@cute.jit
def find(cu_seqlens: Int64, seqused: Int64, piece: Int32, bits: Int32, requests: Int32, tokens: Int32, lane: Int32):
    """(span, sequence, first token, token behind the last, token behind the sequence's last, keys of the sequence); by a
    whole warp. One round trip to memory if there is one sequence, log32(B) + 1 more otherwise."""
    low = Int32(0)
    begin, stop, used = load_sequence(cu_seqlens, seqused, low, requests)
    if (ptx.clamp(stop, Int32(0), tokens) >> bits) + 1 <= piece:
        high = requests
        while low < high:
            step = (high - low + 31) >> 5
            probe = low + (lane + 1) * step
            inside = probe <= high
            offset = ptx.load_i32_if(cu_seqlens + Int64(ptx.select(inside, probe, low)) * 4, Int32(inside), 0)
            first_piece = (ptx.clamp(offset, Int32(0), tokens) >> bits) + probe
            hits = ptx.count_bits(ptx.ballot(Int32(inside & (first_piece <= piece))))
            low = low + hits * step
            high = ptx.minimum_i32(high, low + step - 1)
        begin, stop, used = load_sequence(cu_seqlens, seqused, low, requests)
    span = piece - low
    stop = ptx.select(low < requests, ptx.clamp(stop, Int32(0), tokens), tokens)
    first = ptx.maximum_i32(ptx.clamp(begin, Int32(0), tokens), span << bits)
    last = ptx.minimum_i32(stop, (span + 1) << bits)
    return span, low, first, last, stop, used


def load_sequence(cu_seqlens, seqused, sequence, requests):
    """(offset, next offset, keys); of the tokens past the last sequence: their offset, unspecified, 0."""
    real = Int32(sequence < requests)
    return ptx.load_i32_batch(
        [
            (cu_seqlens + Int64(sequence) * 4, Int32(1), 0),
            (cu_seqlens + Int64(sequence) * 4 + 4, real, 0),
            (seqused + Int64(sequence) * 4, real, 0),
        ]
    )
