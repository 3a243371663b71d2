"""The PTX emulator's tcgen05: tensor memory's transfers after CUTLASS's layouts, copies and products by definition."""

import itertools
import math

import numpy as np
import pytest
import torch
from ptx_emulator.launch import EmulatorError, launch

POLICIES = ["eager+race", "late+race", "random1+race"]
HEAD = ".version 9.0\n.target sm_100a\n.address_size 64\n.extern .shared .align 1024 .b8 s[];\n"
REGISTERS = ".reg .pred %p<9>; .reg .b32 %r<30>; .reg .b32 %v<130>; .reg .b32 %u<130>; .reg .b64 %rd<20>;"
# A warp allocates all of tensor memory, whose address (0) goes to %r3, and one thread makes a barrier at 8.
BEGIN = """
    mov.b32 %r1, s; mov.u32 %r2, %tid.x; shr.u32 %r4, %r2, 5; mov.b32 %r5, 512; mov.b32 %r6, 1;
    setp.ne.b32 %p1, %r4, 0; setp.ne.b32 %p2, %r2, 0;
    @%p2 bra MADE; mbarrier.init.shared::cta.b64 [%r1+8], %r6; MADE: bar.warp.sync -1;
    @%p1 bra ALLOCATED; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], %r5; ALLOCATED: bar.sync 0;
    ld.shared.b32 %r3, [%r1]; shl.b32 %r7, %r4, 21; add.s32 %r7, %r7, %r3;"""  # %r7: this warp's lanes
END = "bar.sync 0; @%p1 bra FREED; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r3, %r5; FREED: bar.sync 0;"
# Waits for what the tensor core's pipe has been given by the first thread.
COMMIT = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r1+8];"
WAIT = "TRY: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r1+8], 0; @!%p3 bra TRY; tcgen05.fence::after_thread_sync;"


def run(body, params, policy, smem=1024):
    declared = ", ".join(f".param .u64 p{i}" for i in range(len(params)))
    text = f"{HEAD}.visible .entry k({declared}) {{\n{REGISTERS}\n{BEGIN}{body}{END}\nret;\n}}\n"
    result = launch(text, "k", 1, 128, smem, params, policy=policy)
    assert result.reports == []


def names(letter, count):
    return "{" + ", ".join(f"%{letter}{i}" for i in range(count)) + "}"


def transfer(verb, shape, letter, count, address, split=None):
    """The text of a load or store; `shape` with its repeats and modifiers."""
    where = address if split is None else f"{address}, {split}"
    registers = names(letter, count)
    return f"tcgen05.{verb}.sync.aligned.{shape}.b32 " + (
        f"{registers}, {where};" if verb == "ld" else f"{where}, {registers};"
    )


def from_global(count):
    """Row `thread` of p0 into %v."""
    loads = "".join(f"ld.global.b32 %v{i}, [%rd2+{4 * i}];" for i in range(count))
    return f"ld.param.u64 %rd1, [p0]; mad.wide.u32 %rd2, %r2, {4 * count}, %rd1; {loads}"


def to_global(count):
    """%u into row `thread` of p1."""
    stores = "".join(f"st.global.b32 [%rd4+{4 * i}], %u{i};" for i in range(count))
    return f"ld.param.u64 %rd3, [p1]; mad.wide.u32 %rd4, %r2, {4 * count}, %rd3; {stores}"


def crd2idx(index, shape, stride):
    """CuTe's layout function of flat modes, the first one fastest."""
    total = 0
    for n, d in zip(shape, stride):
        total, index = total + index % n * d, index // n
    return total


def cute_place(thread, bits, register, repeats):
    """(lane, column) of bit 32 * register of a thread: the destination layouts of SM100_TMEM_LOAD_16dp<bits>b<N>x
    (copy_traits_sm100.hpp) give a bit of 16 lanes of N * bits each."""
    row = bits * repeats
    threads = {64: ((2, 2, 8), (8 * row, 32, row)), 128: ((4, 8), (32, row)), 256: ((4, 8), (64, row))}[bits]
    values = {64: ((32, repeats), (1, 64)), 128: ((32, 2, repeats), (1, 8 * row, 128)),
              256: ((64, 2, repeats), (1, 8 * row, 256))}[bits]  # fmt: skip
    bit = crd2idx(thread, *threads) + crd2idx(32 * register, *values)
    return bit // row, bit % row // 32


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("bits, repeats", [(64, 1), (64, 4), (128, 1), (128, 2), (256, 1), (256, 8), (256, 16)])
def test_sixteen_lanes(policy, bits, repeats):
    """Stored as 32x32b and loaded in the other shape from the upper 16 lanes; and the other way round."""
    columns, count = bits // 32 * repeats, bits * repeats // 64
    memory = torch.arange(128 * columns, dtype=torch.int32).view(128, columns)
    got = torch.zeros(128, count, dtype=torch.int32)
    load = transfer("ld", f"16x{bits}b.x{repeats}", "u", count, "[%r8+4]")
    store = transfer("st", f"32x32b.x{columns}", "v", columns, "[%r7+4]")
    body = f"{from_global(columns)} {store} tcgen05.wait::st.sync.aligned; add.s32 %r8, %r7, {16 << 16};"
    run(f"{body} {load} tcgen05.wait::ld.sync.aligned; {to_global(count)}", [memory, got], policy)
    for thread, register in itertools.product(range(128), range(count)):
        lane, column = cute_place(thread % 32, bits, register, repeats)
        assert got[thread, register] == memory[thread // 32 * 32 + 16 + lane, column]

    back = torch.zeros(128, columns, dtype=torch.int32)
    store = transfer("st", f"16x{bits}b.x{repeats}", "v", count, "[%r7]")
    upper = transfer("st", f"16x{bits}b.x{repeats}", "v", count, "[%r8]")
    load = transfer("ld", f"32x32b.x{columns}", "u", columns, "[%r7]")
    body = f"{from_global(count)} add.s32 %r8, %r7, {16 << 16}; {store} {upper} tcgen05.wait::st.sync.aligned;"
    run(f"{body} {load} tcgen05.wait::ld.sync.aligned; {to_global(columns)}", [got, back], policy)
    for warp in range(4):
        half = memory[32 * warp + 16 : 32 * warp + 32]
        assert torch.equal(back[32 * warp : 32 * warp + 32], half.repeat(2, 1))


@pytest.mark.parametrize("policy", POLICIES)
def test_two_halves(policy):
    """16x32bx2: threads from 16 on have the columns from an offset on."""
    memory = torch.arange(128 * 32, dtype=torch.int32).view(128, 32)
    got = torch.zeros(128, 4, dtype=torch.int32)
    body = f"{from_global(32)} {transfer('st', '32x32b.x32', 'v', 32, '[%r7]')} tcgen05.wait::st.sync.aligned;"
    load = transfer("ld", "16x32bx2.x4", "u", 4, "[%r7+2]", 16)
    run(f"{body} {load} tcgen05.wait::ld.sync.aligned; {to_global(4)}", [memory, got], policy)
    for thread in range(128):
        lane, first = thread // 32 * 32 + thread % 16, 2 + thread % 32 // 16 * 16
        assert torch.equal(got[thread], memory[lane, first : first + 4])


@pytest.mark.parametrize("policy", POLICIES)
def test_halves_of_columns(policy):
    """.pack::16b takes the low halves of neighbouring columns into a register, .unpack::16b spreads them."""
    memory = torch.randint(-(2**31), 2**31, (128, 8), dtype=torch.int64).to(torch.int32)
    got = torch.zeros(128, 4, dtype=torch.int32)
    body = f"{from_global(8)} {transfer('st', '32x32b.x8', 'v', 8, '[%r7]')} tcgen05.wait::st.sync.aligned;"
    load = transfer("ld", "32x32b.x4.pack::16b", "u", 4, "[%r7]")
    run(f"{body} {load} tcgen05.wait::ld.sync.aligned; {to_global(4)}", [memory, got], policy)
    low = memory.numpy().view(np.uint16)[:, ::2]
    assert np.array_equal(got.numpy().view(np.uint16), low)
    back = torch.zeros(128, 8, dtype=torch.int32)
    body = f"{from_global(4)} {transfer('st', '32x32b.x4.unpack::16b', 'v', 4, '[%r7]')} tcgen05.wait::st.sync.aligned;"
    load = transfer("ld", "32x32b.x8", "u", 8, "[%r7]")
    run(f"{body} {load} tcgen05.wait::ld.sync.aligned; {to_global(8)}", [got, back], policy)
    assert np.array_equal(back.numpy().view(np.uint16)[:, ::2], low)


def test_lanes_of_another_warp_are_refused():
    load = transfer("ld", "16x256b.x1", "u", 4, "[%r3]")
    with pytest.raises(EmulatorError, match="warp . reaches lanes .* only, not 0"):
        run(f"{load}", [], "eager")


def placed(matrix, swizzle, mn_major=False):
    """Bytes of an operand in shared memory: rows of `swizzle` bytes (the K of a row, or the rows of a k), eight rows an
    atom, chunks of 16 bytes XORed with address bits; without a swizzle core matrices of 8 x 16 bytes, rows first."""
    raw = (matrix.T if mn_major else matrix).contiguous().view(torch.uint8)
    rows, width = raw.shape
    span = swizzle or 16
    out = torch.zeros(rows * max(width, span), dtype=torch.uint8)
    for r, c in itertools.product(range(rows), range(width // 16)):
        strip, inside = divmod(16 * c, span)
        at = strip * rows * span + r * span + inside
        at ^= (at >> 7 & (span // 16 - 1)) << 4 if swizzle else 0
        out[at : at + 16] = raw[r, 16 * c : 16 * c + 16]
    return out


def descriptor(rows, swizzle, mn_major=False):
    """Without the start. Strips of `swizzle` bytes follow one another; 8 rows an atom."""
    span = swizzle or 16
    stride, strip = 8 * span, rows * span
    mode = {0: 0, 128: 2, 64: 4, 32: 6}[swizzle]
    leading = strip if mn_major or swizzle == 0 else 16
    return mode << 61 | 1 << 46 | stride >> 4 << 32 | leading >> 4 << 16


# p0 into shared memory from 1024 on, visible to the tensor core.
def to_shared(size):
    return f"""
    ld.param.u64 %rd1, [p0]; shl.b32 %r9, %r2, 4; cvt.u64.u32 %rd2, %r9; add.s64 %rd1, %rd1, %rd2;
    add.s32 %r10, %r1, %r9;
    mov.b32 %r11, 0;
    COPY: ld.global.v4.b32 {{%v0, %v1, %v2, %v3}}, [%rd1]; st.shared.v4.b32 [%r10+1024], {{%v0, %v1, %v2, %v3}};
    add.s64 %rd1, %rd1, 2048; add.s32 %r10, %r10, 2048; add.s32 %r11, %r11, 2048; setp.lt.u32 %p4, %r11, {size};
    @%p4 bra COPY; fence.proxy.async.shared::cta; bar.sync 0;
    shr.u32 %r12, %r1, 4; add.s32 %r12, %r12, 64; cvt.u64.u32 %rd5, %r12;"""


SHAPES = {
    "128x256b": lambda lane: lane, "128x128b": lambda lane: lane, "32x128b.warpx4": lambda lane: lane % 32,
    "64x128b.warpx2::02_13": lambda lane: lane % 64, "64x128b.warpx2::01_23": lambda lane: lane // 64 * 32 + lane % 32,
}  # fmt: skip


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("swizzle", [0, 32, 128])
@pytest.mark.parametrize("shape", SHAPES)
def test_copy(policy, shape, swizzle):
    rows, bits = (int(x) for x in shape.split(".")[0][:-1].split("x"))
    columns = bits // 32
    source = torch.randint(0, 256, (rows, 4 * columns), dtype=torch.uint8)
    memory = placed(source, swizzle)
    memory = torch.nn.functional.pad(memory, (0, -len(memory) % 2048))
    got = torch.zeros(128, columns, dtype=torch.int32)
    copy = (
        f"@%p2 bra GIVEN; or.b64 %rd6, %rd5, {descriptor(rows, swizzle)}; tcgen05.cp.cta_group::1.{shape} [%r3], %rd6;"
    )
    load = transfer("ld", f"32x32b.x{columns}", "u", columns, "[%r7]")
    body = f"{to_shared(len(memory))} {copy} {COMMIT} GIVEN: {WAIT} {load} tcgen05.wait::ld.sync.aligned;"
    run(body + to_global(columns), [memory, got], policy, smem=1024 + len(memory))
    want = source.view(torch.int32)[[SHAPES[shape](lane) for lane in range(128)]]
    assert torch.equal(got, want)


TYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
CODES = {"f16": 0, "bf16": 1, "e4m3": 0, "e5m2": 1}
PAIRS = [("f16", "f16"), ("bf16", "bf16"), *itertools.product(("e4m3", "e5m2"), repeat=2)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("a_type, b_type", PAIRS)
@pytest.mark.parametrize("m", [64, 128])
@pytest.mark.parametrize("a_from", ["K-major", "MN-major", "tensor memory"])
def test_products(policy, a_type, b_type, m, a_from):
    """Two products, the second added to the first. M = 64: rows 16 w to 16 w + 15 lie in quarter w's first lanes."""
    n, kind = 32, "f16" if TYPES[a_type].itemsize == 2 else "f8f6f4"
    k, swizzle = 32 // TYPES[a_type].itemsize, 32
    generator = torch.Generator().manual_seed(m)
    a, b = (torch.randn(rows, k, generator=generator).to(TYPES[t]) for rows, t in ((m, a_type), (n, b_type)))
    mn, in_tmem = a_from == "MN-major", a_from == "tensor memory"
    a_bytes, b_bytes = placed(a, swizzle, mn), placed(b, swizzle)
    memory = torch.cat([a_bytes, torch.zeros(-len(a_bytes) % 1024, dtype=torch.uint8), b_bytes])
    b_at = math.ceil(len(a_bytes) / 1024) * 1024
    memory = torch.nn.functional.pad(memory, (0, -len(memory) % 2048))
    instruction = 1 << 4 | CODES[a_type] << 7 | CODES[b_type] << 10 | mn << 15 | n // 8 << 17 | m // 16 << 24
    lanes = [32 * (r // 16) + r % 16 if m == 64 else r for r in range(m)]
    a_words = torch.zeros(128, 8, dtype=torch.int32)
    a_words[lanes] = a.view(torch.int32).view(m, 8)
    fill = ""
    if in_tmem:
        loads = "".join(f"ld.global.b32 %v{i}, [%rd8+{4 * i}];" for i in range(8))
        fill = f"ld.param.u64 %rd7, [p2]; mad.wide.u32 %rd8, %r2, 32, %rd7; {loads}"
        fill += transfer("st", "32x32b.x8", "v", 8, "[%r7+64]") + "tcgen05.wait::st.sync.aligned; "
        fill += "tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;"
    operand = "[%r13]" if in_tmem else "%rd9"
    mma = f"tcgen05.mma.cta_group::1.kind::{kind} [%r3], {operand}, %rd10, %r14, %p5;"
    got = torch.zeros(128, n, dtype=torch.int32)
    body = f"""{to_shared(len(memory))} {fill} @%p2 bra GIVEN; add.s32 %r13, %r3, 64; mov.b32 %r14, {instruction};
    or.b64 %rd9, %rd5, {descriptor(k if mn else m, swizzle, mn)}; add.s64 %rd10, %rd5, {b_at >> 4};
    or.b64 %rd10, %rd10, {descriptor(n, swizzle)}; setp.ne.b32 %p5, 0, 0; {mma} setp.eq.b32 %p5, 0, 0; {mma}
    {COMMIT} GIVEN: {WAIT} {transfer("ld", f"32x32b.x{n}", "u", n, "[%r7]")} tcgen05.wait::ld.sync.aligned;
    {to_global(n)}"""
    run(body, [memory, got, a_words], policy, smem=1024 + len(memory))
    want = 2 * a.double() @ b.double().T
    assert (got.view(torch.float32)[lanes].double() - want).abs().max() <= 1e-5 * want.abs().max()
    beyond = [lane for lane in range(128) if lane not in lanes]
    assert (got[beyond] == -1).all()  # never written
