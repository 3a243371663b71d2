"""SM90: warpgroup matrix multiply (wgmma), and what warp-specialised kernels need with them.

Operands in shared memory are 16-bit, in the 128-byte swizzle that a tensor map with SWIZZLE_128B writes: a row has 64
elements (128 bytes), 8 rows are an atom of 1 KiB, and 16-byte chunk c of row r lies at c ^ (r & 7). A matrix of 128
columns is two such halves, one behind the other. Starts are multiples of 1 KiB plus whole k steps inside the atom.
    K-major (k runs along the row): rows are M or N; 8 of them every 1,024 bytes; a k step of 16 is 32 bytes.
    MN-major (k runs down the rows): the row is 64 of M or N, the next 64 lie `half` bytes on; a k step is 2,048 bytes.

Accumulators are register tensors of N / 2 fp32; lane (g = lane / 4, t = lane % 4) of warp w has element
    4 i + 2 h + c  =  row 16 w + g + 8 h, column 8 i + 2 t + c.
A from registers (wgmma_rs): four words a k step, as in mma.py: (row g, g + 8) x (k 2t, 2t + 8).
wgmma is asynchronous: `fence` before the first of a group that touches registers written since, `commit` behind the last,
and nothing reads or writes the accumulator or the A registers before `wait`, which takes the accumulators so that the
compiler cannot move their uses ahead of it.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T

from shared.ptx import asm


# ---- mbarriers (with mbarrier_init, _expect and _wait of smem.py), named barriers, registers


def mbarrier_arrive(a):
    asm("mbarrier.arrive.shared::cta.b64 _, [$0];", "", "r", [a])


def mbarrier_arrive_if(a, ok):
    asm("{ .reg .pred p; setp.ne.s32 p, $1, 0; @p mbarrier.arrive.shared::cta.b64 _, [$0]; }", "", "rr", [a, ok])


def named_barrier(number, threads):
    """Waits for `threads` threads; numbers 1 to 15."""
    asm("bar.sync $0, $1;", "", "rr", [Int32(number), Int32(threads)])


def named_barrier_arrive(number, threads):
    asm("bar.arrive $0, $1;", "", "rr", [Int32(number), Int32(threads)])


def take_registers(count):
    asm(f"setmaxnreg.inc.sync.aligned.u32 {count};", "", "", [])


def give_registers(count):
    asm(f"setmaxnreg.dec.sync.aligned.u32 {count};", "", "", [])


# ---- wgmma


def descriptor(address, mn_major_half=None):
    """Of an operand at a shared-memory address. MN-major with the byte distance of 64-element halves, else K-major."""
    leading = 16 if mn_major_half is None else mn_major_half
    start = (address & 0x3FFFF) >> 4
    return Int64(start) | Int64((1 << 62) | ((1024 >> 4) << 32) | ((leading >> 4) << 16))


def fence():
    asm("wgmma.fence.sync.aligned;", "", "", [])


def commit():
    asm("wgmma.commit_group.sync.aligned;", "", "", [])


def wait(pending, *accumulators):
    """Until at most `pending` groups of this warpgroup are under way; `accumulators` are those that must be finished."""
    _pin(f"wgmma.wait_group.sync.aligned {pending};", accumulators)


def pin(*accumulators):
    """No instruction; the compiler may not move what touches the accumulators across it."""
    _pin("", accumulators)


def clear(d):
    """Zeros, made here and not earlier: plain constants would be made ahead of a wait, in registers of their own."""
    count = len_of(d)
    text = " ".join(f"mov.b32 ${i}, 0;" for i in range(count))
    _store(d, _call(text, ["=f" if d.element_type is Float32 else "=r"] * count, [], []))


def wgmma_ss(d, a, b, accumulate, dtype, b_mn_major=False):
    """d (+)= A B, m64 k16, both operands by descriptor (Int64). `accumulate` (Python bool) False starts from zero."""
    _wgmma(d, [a], "l", b, accumulate, dtype, b_mn_major)


def wgmma_rs(d, a, b, accumulate, dtype, b_mn_major=False):
    """As wgmma_ss, with A in four registers (Int32 words)."""
    _wgmma(d, list(a), "rrrr", b, accumulate, dtype, b_mn_major)


def _wgmma(d, a, a_letters, b, accumulate, dtype, b_mn_major):
    count = len_of(d)
    registers = ", ".join(f"${i}" for i in range(count))
    # Operands behind the outputs: A, B, then the accumulator as tied inputs if it is read.
    first = count
    a_text = f"${first}" if len(a) == 1 else "{" + ", ".join(f"${first + i}" for i in range(4)) + "}"
    b_text = f"${first + len(a)}"
    flags = ("0, " if len(a) == 1 else "") + ("1" if b_mn_major else "0")
    text = (
        f"{{ .reg .pred p; setp.ne.b32 p, {int(accumulate)}, 0; wgmma.mma_async.sync.aligned.m64n{2 * count}k16.f32."
        f"{dtype}.{dtype} {{{registers}}}, {a_text}, {b_text}, p, 1, 1, {flags}; }}"
    )
    inputs = [x.ir_value() for x in a] + [b.ir_value()]
    letters = list(a_letters) + ["l"]
    if accumulate:
        inputs += [d[i].ir_value() for i in range(count)]
        letters += [str(i) for i in range(count)]
    _store(d, _call(text, ["=f"] * count, letters, inputs))


def _pin(text, accumulators):
    for d in accumulators[1:]:
        _pin("", (d,))
    if not accumulators:
        return asm(text, "", "", [])
    d = accumulators[0]
    count = len_of(d)
    inputs = [d[i].ir_value() for i in range(count)]
    # The waiting instruction first: what it pins follows.
    letter = "f" if d.element_type is Float32 else "r"
    _store(d, _call(text or "// pinned", ["=" + letter] * count, [str(i) for i in range(count)], inputs))


def len_of(d):
    return cute.size(d.layout)


def _call(text, outputs, letters, inputs):
    types = [T.f32() if letter == "=f" else T.i32() for letter in outputs]
    result_type = types[0] if len(types) == 1 else llvm.StructType.get_literal(types)
    constraints = ",".join([*outputs, *letters, "~{memory}"])
    result = llvm.inline_asm(
        result_type,
        inputs,
        text,
        constraints,
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    if len(types) == 1:
        return [result]
    return [llvm.extractvalue(t, result, [i]) for i, t in enumerate(types)]


def _store(d, values):
    for i, value in enumerate(values):
        d[i] = d.element_type(value)
