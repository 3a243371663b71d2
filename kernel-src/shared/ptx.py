"""One-line wrappers of PTX instructions for kernels that lay out their own registers.

Memory-bound kernels here spell out widths, predicates and cache behaviour instead of leaving them to layout algebra.
Addresses are Int64 (global). A wrapper takes and returns DSL scalars; `nc` loads are for memory that no thread of the
launch writes.
"""

from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import arith, llvm
from cutlass.cutlass_dsl import T

# constraint letter -> (MLIR type, DSL scalar)
_SCALAR = {"r": (T.i32, Int32), "l": (T.i64, Int64), "f": (T.f32, Float32)}


def asm(text, outputs, inputs, args, side_effects=True):
    """Inline PTX. `outputs` and `inputs` are constraint letters; returns the list of results."""
    operands = [(a if hasattr(a, "ir_value") else _SCALAR[c][1](a)).ir_value() for a, c in zip(args, inputs)]
    constraints = ",".join(["=" + c for c in outputs] + list(inputs))
    types = [_SCALAR[c][0]() for c in outputs]
    result_type = None if not types else types[0] if len(types) == 1 else llvm.StructType.get_literal(types)
    result = llvm.inline_asm(
        result_type,
        operands,
        text,
        constraints,
        has_side_effects=side_effects,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    if len(types) == 1:
        return [_SCALAR[outputs[0]][1](result)]
    return [_SCALAR[c][1](llvm.extractvalue(t, result, [i])) for i, (c, t) in enumerate(zip(outputs, types))]


def select(condition, if_true, if_false):
    return type(if_true)(arith.select(condition.ir_value(), if_true.ir_value(), if_false.ir_value()))


# ---- global memory


def load_f32_if(address, ok, otherwise):
    """One fp32 where `ok` (Int32) is not 0, else the hexadecimal bit pattern `otherwise` ("0fFF800000" is -inf)."""
    text = "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.f32 $0, %s; @p ld.global.nc.f32 $0, [$1]; }" % otherwise
    return asm(text, "f", "lr", [address, ok])[0]


def load_16_bytes_if(address, ok):
    """Four 32-bit words from a 16-byte aligned address where `ok` is not 0, else zeros."""
    zeros = " ".join(f"mov.b32 ${i}, 0;" for i in range(4))
    text = "{ .reg .pred p; setp.ne.s32 p, $5, 0; %s @p ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4]; }" % zeros
    return asm(text, "rrrr", "lr", [address, ok])


def load_8_bytes(address):
    """Two 32-bit words from an 8-byte aligned address."""
    return asm("ld.global.nc.v2.b32 {$0, $1}, [$2];", "rr", "l", [address])


def store_words(address, words):
    """One, two or four 32-bit words in one access."""
    vector = {1: "", 2: ".v2", 4: ".v4"}[len(words)]
    regs = ", ".join(f"${i + 1}" for i in range(len(words)))
    text = f"st.global{vector}.b32 [$0], {regs};" if len(words) == 1 else f"st.global{vector}.b32 [$0], {{{regs}}};"
    asm(text, "", "l" + "r" * len(words), [address] + list(words))


def store_f32(address, value):
    asm("st.global.f32 [$0], $1;", "", "lf", [address, value])


def store_low_half(address, word):
    asm("{ .reg .b16 h, x; mov.b32 {h, x}, $1; st.global.b16 [$0], h; }", "", "lr", [address, word])


# ---- arithmetic


def exp2(x):
    return asm("ex2.approx.ftz.f32 $0, $1;", "f", "f", [x], False)[0]


def log2(x):
    return asm("lg2.approx.ftz.f32 $0, $1;", "f", "f", [x], False)[0]


def reciprocal(x):
    return asm("rcp.approx.ftz.f32 $0, $1;", "f", "f", [x], False)[0]


def maximum(a, b):
    """The larger one; a NaN loses against a number."""
    return asm("max.f32 $0, $1, $2;", "f", "ff", [a, b], False)[0]


def maximum_in_order(a, b):
    """As `maximum`; stays behind the waits before it."""
    return asm("max.f32 $0, $1, $2;", "f", "ff", [a, b])[0]


def fma(a, b, c):
    return asm("fma.rn.f32 $0, $1, $2, $3;", "f", "fff", [a, b, c], False)[0]


def multiply(a, b):
    """Rounded by itself: never contracted with an addition that follows."""
    return asm("mul.rn.f32 $0, $1, $2;", "f", "ff", [a, b], False)[0]


def ceiling(x):
    return asm("cvt.rpi.f32.f32 $0, $1;", "f", "f", [x], False)[0]


def absolute(x):
    return asm("abs.f32 $0, $1;", "f", "f", [x], False)[0]


def minimum_i32(a, b):
    return asm("min.s32 $0, $1, $2;", "r", "rr", [a, b], False)[0]


def maximum_i32(a, b):
    return asm("max.s32 $0, $1, $2;", "r", "rr", [a, b], False)[0]


def maximum_u32(a, b):
    return asm("max.u32 $0, $1, $2;", "r", "rr", [a, b], False)[0]


def above_u32(a, bound):
    """a > bound, unsigned."""
    return asm("{ .reg .pred p; setp.gt.u32 p, $1, %d; selp.s32 $0, 1, 0, p; }" % bound, "r", "r", [a], False)[0] != 0


def maximum3_i32(a, b, c):
    return asm("{ .reg .s32 t; max.s32 t, $1, $2; max.s32 $0, t, $3; }", "r", "rrr", [a, b, c], False)[0]


def maximum3_of_bits_in_order(a, b, c):
    """The largest bit pattern of fp32 numbers, as a signed integer; stays behind the waits before it."""
    text = "{ .reg .s32 a, b, c; mov.b32 a, $1; mov.b32 b, $2; mov.b32 c, $3; max.s32 a, a, b; max.s32 $0, a, c; }"
    return asm(text, "r", "fff", [a, b, c])[0]


def maximum3_with_bits_in_order(largest, b, c):
    """As `maximum3_of_bits_in_order`, the first being such a pattern (Int32)."""
    text = "{ .reg .s32 a, b, c; mov.b32 b, $2; mov.b32 c, $3; max.s32 a, $1, b; max.s32 $0, a, c; }"
    return asm(text, "r", "rff", [largest, b, c])[0]


# ---- conversion of packed pairs; the low half holds the element of the lower index


def f32_bits(x):
    return asm("mov.b32 $0, $1;", "r", "f", [x], False)[0]


def f32_from_bits(word):
    return asm("mov.b32 $0, $1;", "f", "r", [word], False)[0]


def unpack_bf16(word):
    text = "{ .reg .b32 t; shl.b32 t, $2, 16; mov.b32 $0, t; and.b32 t, $2, 0xffff0000; mov.b32 $1, t; }"
    return asm(text, "ff", "r", [word], False)


def unpack_fp16(word):
    text = "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $2; cvt.f32.f16 $0, lo; cvt.f32.f16 $1, hi; }"
    return asm(text, "ff", "r", [word], False)


def pack_bf16(low, high):
    return asm("cvt.rn.bf16x2.f32 $0, $2, $1;", "r", "ff", [low, high], False)[0]


def pack_fp16(low, high):
    return asm("cvt.rn.f16x2.f32 $0, $2, $1;", "r", "ff", [low, high], False)[0]


def select_value(condition, if_true, if_false):
    """As `select`; the compiler cannot turn it into a load from a selected parameter address."""
    letter = {Int32: "r", Int64: "l", Float32: "f"}[type(if_true)]
    kind = {"r": "b32", "l": "b64", "f": "f32"}[letter]
    text = "{ .reg .pred p; setp.ne.s32 p, $1, 0; selp.%s $0, $2, $3, p; }" % kind
    return asm(text, letter, "r" + 2 * letter, [Int32(condition), if_true, if_false], False)[0]


# ---- programmatic dependent launch (both do nothing in a launch without the attribute)


def wait_for_previous_kernel():
    """Blocks until the kernel launched before has finished and its writes can be seen. No global access before this."""
    asm("griddepcontrol.wait;", "", "", [])


def let_next_kernel_start():
    """The next kernel may be scheduled once every CTA has said this; its own wait still covers all of this kernel."""
    asm("griddepcontrol.launch_dependents;", "", "", [])


# ---- global memory that a kernel still running may write (no .nc)


def load_i32(address):
    return asm("ld.global.b32 $0, [$1];", "r", "l", [address])[0]


def load_i32_batch(places, past_l1=False):
    """Loads (address, ok, otherwise) issued together, before anything is made of the first: one latency.

    `past_l1`: leaves no copy in L1, for values that another kernel may still be writing and that are only a hint.
    """
    load = "ld.relaxed.gpu.global.b32" if past_l1 else "ld.global.b32"
    n = len(places)
    lines = [f"mov.b32 ${i}, {otherwise};" for i, (_, _, otherwise) in enumerate(places)]
    lines += [f"setp.ne.s32 p, ${n + 2 * i + 1}, 0; @p {load} ${i}, [${n + 2 * i}];" for i in range(n)]
    arguments = [x for address, ok, _ in places for x in (address, ok)]
    return asm("{ .reg .pred p; %s }" % " ".join(lines), "r" * n, "lr" * n, arguments)


def load_f32(address):
    return asm("ld.global.f32 $0, [$1];", "f", "l", [address])[0]


def load_f32_or_one(address):
    """One fp32, or 1 for a null pointer: an absent scale."""
    text = "{ .reg .pred p; setp.ne.s64 p, $1, 0; mov.f32 $0, 0f3F800000; @p ld.global.f32 $0, [$1]; }"
    return asm(text, "f", "l", [address])[0]


def load_fresh_16_bytes_if(address, ok):
    """As `load_16_bytes_if`, for memory that an earlier kernel wrote."""
    zeros = " ".join(f"mov.b32 ${i}, 0;" for i in range(4))
    text = "{ .reg .pred p; setp.ne.s32 p, $5, 0; %s @p ld.global.v4.b32 {$0, $1, $2, $3}, [$4]; }" % zeros
    return asm(text, "rrrr", "lr", [address, ok])


def prefetch_l2(address):
    """Has no effect on values, so it may run before the dependence is resolved."""
    asm("prefetch.global.L2 [$0];", "", "l", [address])


def prefetch_l2_if(address, ok):
    asm("{ .reg .pred p; setp.ne.s32 p, $1, 0; @p prefetch.global.L2 [$0]; }", "", "lr", [address, ok])


def load_i32_if(address, ok, otherwise):
    text = "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.b32 $0, %d; @p ld.global.b32 $0, [$1]; }" % otherwise
    return asm(text, "r", "lr", [address, ok])[0]


def load_f32_coherent_if(address, ok, otherwise):
    """As load_f32_if, for memory that the kernel launched before wrote."""
    text = "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.f32 $0, %s; @p ld.global.f32 $0, [$1]; }" % otherwise
    return asm(text, "f", "lr", [address, ok])[0]


def load_f32x2_if(address, ok, otherwise):
    """Two fp32 that the kernel launched before wrote, or (`otherwise`, 0)."""
    text = "{ .reg .pred p; setp.ne.s32 p, $3, 0; mov.f32 $0, $4; mov.f32 $1, 0f00000000; @p ld.global.v2.f32 {$0, $1}, [$2]; }"
    return asm(text, "ff", "lrf", [address, ok, Float32(otherwise)])


def stream_16_bytes_if(address, ok):
    """Four words read once: not kept in L1. Zeros where `ok` is 0."""
    zeros = " ".join(f"mov.b32 ${i}, 0;" for i in range(4))
    load = "ld.global.L1::no_allocate.L2::128B.v4.b32 {$0, $1, $2, $3}, [$4];"
    text = "{ .reg .pred p; setp.ne.s32 p, $5, 0; %s @p %s }" % (zeros, load)
    return asm(text, "rrrr", "lr", [address, ok])


def store_words_if(address, words, ok):
    """As store_words, where `ok` is not 0."""
    vector = {1: "", 2: ".v2", 4: ".v4"}[len(words)]
    regs = ", ".join(f"${i + 2}" for i in range(len(words)))
    regs = regs if len(words) == 1 else "{%s}" % regs
    text = "{ .reg .pred p; setp.ne.s32 p, $1, 0; @p st.global%s.b32 [$0], %s; }" % (vector, regs)
    asm(text, "", "lr" + "r" * len(words), [address, ok] + list(words))


# ---- shared memory; addresses are Int32


def barrier():
    """All threads of the CTA."""
    asm("bar.sync 0;", "", "", [])


def warp_barrier():
    asm("bar.warp.sync 0xffffffff;", "", "", [])


# ---- warp


def shuffle_xor_f32(x, distance):
    return asm(f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, 0xffffffff;", "f", "f", [x])[0]


def shuffle_xor(x, distance):
    return asm(f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, 0xffffffff;", "r", "r", [x])[0]


def transpose_quad(words, t):
    """Four lanes with four words each: word i of lane t becomes word t of lane i."""
    words = list(words)
    for distance in (1, 2):
        high = (t & distance) != 0
        for a in [i for i in range(4) if not i & distance]:
            b = a + distance
            sent = select(high, words[a], words[b])
            came = shuffle_xor(sent, distance)
            words[a], words[b] = select(high, came, words[a]), select(high, words[b], came)
    return words


def shuffle(x, lane):
    """x of the given lane."""
    return asm("shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;", "r", "rr", [x, lane])[0]


def shuffle_up(word, distance):
    """The word of the lane `distance` below; the lowest lanes keep theirs."""
    return asm(f"shfl.sync.up.b32 $0, $1, {distance}, 0, 0xffffffff;", "r", "r", [word])[0]


def ballot(ok):
    text = "{ .reg .pred p; setp.ne.s32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }"
    return asm(text, "r", "r", [Int32(ok)])[0]


def any_lane(ok):
    text = "{ .reg .pred p; setp.ne.s32 p, $1, 0; vote.sync.any.pred p, p, 0xffffffff; selp.s32 $0, 1, 0, p; }"
    return asm(text, "r", "r", [Int32(ok)])[0] != 0


def lanes_with_the_same(word):
    return asm("match.any.sync.b32 $0, $1, 0xffffffff;", "r", "r", [word])[0]


def warp_sum(x):
    return asm("redux.sync.add.s32 $0, $1, 0xffffffff;", "r", "r", [x])[0]


def warp_min(x):
    return asm("redux.sync.min.s32 $0, $1, 0xffffffff;", "r", "r", [x])[0]


def warp_prefix_sum(x, lane):
    """Over the lanes up to and including this one."""
    for distance in (1, 2, 4, 8, 16):
        before = shuffle_up(x, distance)
        x = x + select(lane >= distance, before, Int32(0))
    return x


def lanes_below():
    """Bit mask of the lanes before this one."""
    return asm("mov.u32 $0, %lanemask_lt;", "r", "", [], False)[0]


def count_bits(x):
    return asm("popc.b32 $0, $1;", "r", "r", [x], False)[0]


def lowest_bit(x):
    """Its number."""
    return count_bits((x & (0 - x)) - 1)


# ---- integer and floating-point arithmetic


def clamp(x, low, high):
    """min(max(x, low), high), signed."""
    return asm("{ .reg .s32 t; max.s32 t, $1, $2; min.s32 $0, t, $3; }", "r", "rrr", [x, low, high], False)[0]


def canonical(x):
    """NaN becomes -inf and -0.0 becomes 0.0; every other number stays."""
    text = "{ .reg .f32 t; add.rn.f32 t, $1, 0f00000000; max.f32 $0, t, 0fFF800000; }"
    return asm(text, "f", "f", [x], False)[0]


def divide_u32(a, b):
    return asm("div.u32 $0, $1, $2;", "r", "rr", [a, b], False)[0]


def divide(a, b):
    """IEEE division, as torch divides."""
    return asm("div.rn.f32 $0, $1, $2;", "f", "ff", [a, b], False)[0]


def permute_bytes(a, b, selector):
    return asm("prmt.b32 $0, $1, $2, %d;" % selector, "r", "rr", [a, b], False)[0]


# ---- float8; four values a word, the lowest byte first


def pack_float8(values, kind):
    """Round to nearest even and saturate to the largest finite value; NaN becomes NaN with the sign of the input.

    `kind` is "e4m3" or "e5m2". The conversion instruction makes every NaN 0x7f, where torch keeps its sign.
    """
    text = (
        "{ .reg .b16 lo, hi; cvt.rn.satfinite.%sx2.f32 lo, $2, $1; cvt.rn.satfinite.%sx2.f32 hi, $4, $3; "
        "mov.b32 $0, {lo, hi}; }" % (kind, kind)
    )
    word = asm(text, "r", "ffff", values, False)[0]
    bits = [f32_bits(x) for x in values]
    low, high = permute_bytes(bits[0], bits[1], 0x73), permute_bytes(bits[2], bits[3], 0x73)
    return word | (permute_bytes(low, high, 0x5410) & Int32(-0x7F7F7F80))
