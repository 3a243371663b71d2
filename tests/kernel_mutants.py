"""Seeded faults in the kernels' sources, for tests/mutation.py: what a kernel computes, where the faults in the PTX are of
how its threads work together (test_emulated_faults.py). mutants.py says what a fault is; here `programs` are compiled with
it, and the tests run in the emulator, with every other program as shipped.
"""

from mutants import Mutant


def kernel(fault, file, before, after, programs, *tests):
    names = tuple(f"tests/test_emulated_{test}" for test in tests)
    return Mutant(fault, f"kernel-src/{file}", before, after, names, tuple(programs.split()))


NEUTRAL = [
    kernel("decode: the last quarter of a block ends a key early", "neutral/decode.py",
           "visible = end - (block << paging.BLOCK_BITS) - quarter * KEYS",
           "visible = end - (block << paging.BLOCK_BITS) - quarter * KEYS - 1", "decode_bf16_s2_sm90a",
           "decode.py::test_against_float64[bfloat16-bfloat16-2]"),
    kernel("decode: the LSE without its maximum", "neutral/decode.py", "softmax.natural_lse(m, total)",
           "softmax.natural_lse(Float32(0.0), total)", "decode_bf16_s1_sm90a", "decode.py::test_against_float64[bfloat16-bfloat16-1]"),
]  # fmt: skip

SM90 = [
]  # fmt: skip

SM100 = [
]  # fmt: skip

ALL = NEUTRAL + SM90 + SM100
