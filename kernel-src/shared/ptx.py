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


def store_words(address, words):
    """One, two or four 32-bit words in one access."""
    vector = {1: "", 2: ".v2", 4: ".v4"}[len(words)]
    regs = ", ".join(f"${i + 1}" for i in range(len(words)))
    text = f"st.global{vector}.b32 [$0], {regs};" if len(words) == 1 else f"st.global{vector}.b32 [$0], {{{regs}}};"
    asm(text, "", "l" + "r" * len(words), [address] + list(words))


def store_f32(address, value):
    asm("st.global.f32 [$0], $1;", "", "lf", [address, value])


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


def fma(a, b, c):
    return asm("fma.rn.f32 $0, $1, $2, $3;", "f", "fff", [a, b, c], False)[0]


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
