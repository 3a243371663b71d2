"""SM100: tensor memory, the tensor core that works on it (tcgen05), and arithmetic on pairs.

Tensor memory has 128 lanes x 512 columns of 32 bits; an address is lane << 16 | column. Warp w reaches the lanes of its
quarter, 32 (w % 4) on. A product of M = 128 has row r in lane r, column c of N in column c.

Operands in shared memory are 16-bit in the 128-byte swizzle, as hopper.py describes: K-major with rows of 64 elements, or
MN-major with halves of 64. A, 16-bit, may also lie in tensor memory: two elements of a row a column.

tcgen05.mma and tcgen05.commit are asynchronous, run in the order of their issue, and are issued by one thread: the wrappers
here are called by a whole warp and elect it, always the same. A commit arrives at its mbarrier once everything issued
before it is done. What warps read or wrote in tensor memory is ordered with them by
    load or store, its wait, fence_before, an mbarrier  ->  the other side's wait, fence_after, its access.
"""

from cutlass import Float32, Int32, Int64

from shared import ptx, softmax
from shared.ptx import asm

COLUMNS = 512
K_STEPS = 8  # of a product over 128 elements, 16 each

_ELECT = ".reg .pred e; elect.sync _|e, 0xffffffff;"

# ---- tensor memory


def allocate(slot, columns):
    """By one warp, which frees it too. The address goes to shared memory at `slot`; others read it behind a barrier."""
    asm("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [$0], $1;", "", "rr", [slot, Int32(columns)])
    asm("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;", "", "", [])


def free(address, columns):
    asm("tcgen05.dealloc.cta_group::1.sync.aligned.b32 $0, $1;", "", "rr", [address, Int32(columns)])


def fence_before():
    asm("tcgen05.fence::before_thread_sync;", "", "", [])


def fence_after():
    asm("tcgen05.fence::after_thread_sync;", "", "", [])


def _registers(first, count):
    return "{" + ", ".join(f"${first + i}" for i in range(count)) + "}"


def load_row(address, columns):
    """fp32 in `columns` columns of this thread's lane: the quarter's lane of the same number."""
    step = min(columns, 32)
    loads = [
        f"tcgen05.ld.sync.aligned.32x32b.x{step}.b32 {_registers(at, step)}, [${columns} + {at}];"
        for at in range(0, columns, step)
    ]
    text = " ".join(loads) + " tcgen05.wait::ld.sync.aligned;"
    return asm(text, "f" * columns, "r", [address])


def load_fragments(address, columns):
    """fp32 of 16 lanes, as the accumulators of wgmma lie in a warp: thread 4 g + t has, of columns 8 i + 2 t + c and lanes
    g + 8 h, number 4 i + 2 h + c."""
    count = columns // 2
    text = f"tcgen05.ld.sync.aligned.16x256b.x{columns // 8}.b32 {_registers(0, count)}, [${count}]; "
    return asm(text + "tcgen05.wait::ld.sync.aligned;", "f" * count, "r", [address])


def store_row(address, words):
    """Asynchronous: wait_stores before it is used."""
    n = len(words)
    asm(
        f"tcgen05.st.sync.aligned.32x32b.x{n}.b32 [$0], {_registers(1, n)};", "", "r" * (n + 1), [address] + list(words)
    )


def wait_stores():
    asm("tcgen05.wait::st.sync.aligned;", "", "", [])


# ---- products


def instruction(dtype, n, b_mn_major=False):
    """M = 128, fp32 accumulators, operands of one 16-bit type."""
    kind = {"f16": 0, "bf16": 1}[dtype]
    return (1 << 4) | (kind << 7) | (kind << 10) | (int(b_mn_major) << 16) | (n // 8 << 17) | (128 // 16 << 24)


def descriptor(address, mn_major_half=None):
    """Of an operand in shared memory. MN-major with the byte distance of 64-element halves, else K-major."""
    leading = 16 if mn_major_half is None else mn_major_half
    start = (address & 0x3FFFF) >> 4
    return Int64(start) | Int64((2 << 61) | (1 << 46) | ((1024 >> 4) << 32) | ((leading >> 4) << 16))


def k_major_step(step, half):
    """What a k step of 16 adds to a K-major descriptor whose halves of 64 elements are `half` bytes apart."""
    return ((step >> 2) * half + (step & 3) * 32) >> 4


def mn_major_step(step):
    return step * 2048 >> 4


def multiply(d, a, b, kind, a_steps, b_steps, accumulate=None, elements="f16"):
    """The tensor memory at `d` = A B, or += where `accumulate` (Int32) is not 0. A is a descriptor (Int64) or an address in
    tensor memory (Int32), B a descriptor; a_steps and b_steps say what each k step adds to them; `kind` is of
    `instruction`, of 16-bit `elements` or "f8f6f4"."""
    in_tensor_memory = isinstance(a, Int32)
    width, letter = ("b32", "r") if in_tensor_memory else ("b64", "l")
    operand = "[a]" if in_tensor_memory else "a"
    lines = [f"{{ {_ELECT} .reg .pred more; .reg .{width} a; .reg .b64 b; .reg .b32 i; mov.b32 i, {kind};"]
    for number, (a_step, b_step) in enumerate(zip(a_steps, b_steps)):
        if number < 2:
            lines.append(f"setp.ne.s32 more, {'$3' if number == 0 and accumulate is not None else number}, 0;")
        lines.append(f"add.s{width[1:]} a, $1, {a_step}; add.s64 b, $2, {b_step};")
        lines.append(f"@e tcgen05.mma.cta_group::1.kind::{elements} [$0], {operand}, b, i, more;")
    arguments = [d, a, b] if accumulate is None else [d, a, b, accumulate]
    asm(" ".join(lines) + " }", "", f"r{letter}lr"[: len(arguments)], arguments)


def commit(mbarrier):
    text = f"{{ {_ELECT} @e tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [$0]; }}"
    asm(text, "", "r", [mbarrier])


def commit_if(mbarrier, ok):
    """Where `ok`, the same in all lanes, is not 0."""
    text = (
        f"{{ {_ELECT} .reg .pred p; setp.ne.and.s32 p, $1, 0, e; "
        "@p tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [$0]; }"
    )
    asm(text, "", "rr", [mbarrier, ok])


# ---- arithmetic


def maximum3(a, b, c):
    """A NaN loses against a number."""
    return asm("max.f32 $0, $1, $2, $3;", "f", "fff", [a, b, c], False)[0]


def _pairs(text, *pairs):
    n = len(pairs)
    names = "abc"[:n]
    moves = " ".join(f"mov.b64 {x}, {{${2 + 2 * i}, ${3 + 2 * i}}};" for i, x in enumerate(names))
    text = f"{{ .reg .b64 {', '.join(names)}, d; {moves} {text} mov.b64 {{$0, $1}}, d; }}"
    return asm(text, "ff", "ff" * n, [x for pair in pairs for x in pair], False)


def fma2(a, b, c):
    return _pairs("fma.rn.f32x2 d, a, b, c;", a, b, c)


def add2(a, b):
    return _pairs("add.rn.f32x2 d, a, b;", a, b)


def multiply2(a, b):
    return _pairs("mul.rn.f32x2 d, a, b;", a, b)


# 2^f for f in [-1/2, 1/2], smallest largest relative error: 7.5e-5 and 2.7e-6.
POLYNOMIALS = {
    3: (0.9999280571937561, 0.6932609677314758, 0.2426111251115799, 0.0551716685295105),
    4: (0.9999992847442627, 0.6931217908859253, 0.240247443318367, 0.05591785907745361, 0.009570102207362652),
}


def exp2_pair(x, y, degree):
    """2^x and 2^y for x, y < 127 without the special-function unit; 0 from -127 down, NaN of NaN."""
    numbers = [asm("max.NaN.f32 $0, $1, $2;", "f", "ff", [v, Float32(-127.0)], False)[0] for v in (x, y)]
    # The sum's low bits are the nearest integer and the exponent's bias.
    rounded = add2(numbers, [Float32(softmax.SHIFT)] * 2)
    integer = add2(rounded, [Float32(-softmax.SHIFT)] * 2)
    fraction = fma2(integer, [Float32(-1.0)] * 2, numbers)
    coefficients = [[Float32(c)] * 2 for c in POLYNOMIALS[degree]]
    value = coefficients[-1]
    for c in coefficients[-2::-1]:
        value = fma2(value, fraction, c)
    return multiply2(value, [ptx.f32_from_bits(ptx.f32_bits(r) << 23) for r in rounded])


# ---- softmax of a row that one thread holds


def row_maximum(values):
    """Four chains, three operands a step."""
    chains, rest = values[:4], values[4:]
    steps = len(rest) // 8
    for i in range(steps):
        chains = [maximum3(c, rest[8 * i + 2 * j], rest[8 * i + 2 * j + 1]) for j, c in enumerate(chains)]
    chains = [ptx.maximum(a, b) for a, b in zip(chains, rest[8 * steps :])]
    return ptx.maximum(ptx.maximum(chains[0], chains[1]), ptx.maximum(chains[2], chains[3]))


def probabilities(logits, scale, top, totals, dtype, polynomial):
    """2^(logit * scale - top), rounded to `dtype`, in words; and `totals`, two pairs of sums, with what they add. Of 8 pairs
    `polynomial` are made without the special-function unit."""
    pack, degree = (ptx.pack_bf16, 3) if dtype == "bf16" else (ptx.pack_fp16, 4)
    words = []
    for pair in range(len(logits) // 2):
        x = fma2(logits[2 * pair : 2 * pair + 2], (scale, scale), (-top, -top))
        p = exp2_pair(*x, degree) if pair % 8 < polynomial else [ptx.exp2(x[0]), ptx.exp2(x[1])]
        totals = [totals[1], add2(totals[0], p)]  # in turn
        words.append(pack(*p))
    return words, totals
