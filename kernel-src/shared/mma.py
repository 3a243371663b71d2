"""Warp-level matrix multiply m16n8k16 with fp32 accumulators, and what feeds it.

Fragments of a lane (g = lane / 4, t = lane % 4), two elements a word:
    A [16, 16]  words 0..3: rows g, g+8, g, g+8; columns 2t, 2t+1 (words 0, 1) and 2t+8, 2t+9 (words 2, 3)
    B [16, 8]   words 0, 1: column g; rows 2t, 2t+1 and 2t+8, 2t+9
    C [16, 8]   fp32 0..3: row g columns 2t, 2t+1; row g+8 columns 2t, 2t+1
"""

from cutlass import Float32, Int32

from shared.ptx import asm, permute_bytes


def mma(c, a, b0, b1, dtype):
    """c + A B; dtype "bf16" or "f16". `c` None stands for zeros."""
    if c is None:
        c = [Float32(0.0)] * 4
    text = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    return asm(text, "ffff", "rrrrrrffff", list(a) + [b0, b1] + list(c), False)


def load_matrices(a, transposed=False):
    """Four 8 x 8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8."""
    trans = ".trans" if transposed else ""
    return asm(f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{$0, $1, $2, $3}}, [$4];", "rrrr", "r", [a])


def widen_e4m3(word):
    """Four e4m3 -> two words of two fp16. Exact: every finite e4m3 is an fp16."""
    text = "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $2; cvt.rn.f16x2.e4m3x2 $0, lo; cvt.rn.f16x2.e4m3x2 $1, hi; }"
    return asm(text, "rr", "r", [word], False)


def widen_e5m2(word):
    """Four e5m2 -> two words of two fp16. An e5m2 is the high byte of an fp16."""
    zero = Int32(0)
    return [permute_bytes(word, zero, 0x1404), permute_bytes(word, zero, 0x3424)]
