"""The PTX emulator itself: small programs whose results are known, and the errors that it must raise."""

import numpy as np
import pytest
import torch
from ptx_emulator.launch import DeadlockError, EmulatorError, launch, load
from ptx_emulator.parser import Unsupported
from ptx_emulator.tensor_map import encode

HEAD = ".version 9.0\n.target sm_90a\n.address_size 64\n"
REGISTERS = ".reg .pred %p<9>; .reg .b16 %h<9>; .reg .b32 %r<40>; .reg .b64 %rd<20>;"


def program(body, params=".param .u64 a, .param .u64 b", shared=""):
    return f"{HEAD}{shared}\n.visible .entry k({params}) {{\n{REGISTERS}\n{body}\nret;\n}}\n"


def run(body, *params, block=32, grid=1, smem=0, policy="eager", shared="", kinds=None, **options):
    declared = ", ".join(f".param .{kind} p{i}" for i, kind in enumerate(kinds or ["u64"] * len(params)))
    text = program(body, declared, shared)
    return launch(text, "k", grid, block, smem, list(params), policy=policy, **options)


def unary(op, x, kind="b32", out=np.uint32):
    """op applied to 32 numbers, one a lane."""
    result, width = np.zeros(32, out), {2: "16", 4: "32", 8: "64"}
    load_kind, store_kind = "b" + width[x.itemsize], "b" + width[np.dtype(out).itemsize]
    names = {2: "%h", 4: "%r", 8: "%rd"}
    source, target = names[x.itemsize] + "1", names[np.dtype(out).itemsize] + "2"
    run(
        f"""
        ld.param.u64 %rd8, [p0]; ld.param.u64 %rd9, [p1]; mov.u32 %r8, %tid.x;
        mad.wide.u32 %rd8, %r8, {x.itemsize}, %rd8; mad.wide.u32 %rd9, %r8, {np.dtype(out).itemsize}, %rd9;
        ld.global.{load_kind} {source}, [%rd8];
        {op} {target}, {source};
        st.global.{store_kind} [%rd9], {target};""",
        x,
        result,
    )
    return result


def binary(op, x, y, out):
    """op applied to 32 pairs of 32-bit numbers."""
    result = np.zeros(32, out)
    size = result.itemsize
    target = "%r3" if size == 4 else "%rd3"
    run(
        f"""
        ld.param.u64 %rd8, [p0]; ld.param.u64 %rd9, [p1]; ld.param.u64 %rd10, [p2]; mov.u32 %r8, %tid.x;
        mad.wide.u32 %rd8, %r8, 4, %rd8; mad.wide.u32 %rd9, %r8, 4, %rd9; mad.wide.u32 %rd10, %r8, {size}, %rd10;
        ld.global.b32 %r1, [%rd8]; ld.global.b32 %r2, [%rd9];
        {op} {target}, %r1, %r2;
        st.global.b{8 * size} [%rd10], {target};""",
        x,
        y,
        result,
    )
    return result


generator = np.random.default_rng(0)
U32 = generator.integers(0, 1 << 32, 32, dtype=np.uint32)
V32 = generator.integers(0, 1 << 32, 32, dtype=np.uint32)
V32[:4] = (0, 1, 0xFFFFFFFF, 0x80000000)
F32 = (generator.standard_normal(32) * 100).astype(np.float32)
G32 = generator.standard_normal(32).astype(np.float32)


@pytest.mark.parametrize(
    "op, want",
    [
        ("add.s32", U32 + V32), ("sub.u32", U32 - V32), ("mul.lo.s32", U32 * V32), ("and.b32", U32 & V32),
        ("xor.b32", U32 ^ V32), ("max.u32", np.maximum(U32, V32)),
        ("min.s32", np.minimum(U32.view("i4"), V32.view("i4"))),
        ("mul.hi.u32", (U32.astype("u8") * V32 >> np.uint64(32)).astype("u4")),
        ("mul.wide.s32", U32.view("i4").astype("i8") * V32.view("i4")),
        ("shl.b32", np.where(V32 < 32, U32 << (V32 & np.uint32(31)), 0).astype("u4")),
        ("shr.s32", U32.view("i4") >> np.minimum(V32, 31).astype("i4")),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
def test_integers(op, want):
    got = binary(op, U32, V32, np.uint64 if want.itemsize == 8 else np.uint32)
    np.testing.assert_array_equal(got, want.view(got.dtype))


@pytest.mark.parametrize("op", ["add", "sub", "mul", "div"])
def test_floats_round_once(op):
    want = {"add": F32 + G32, "sub": F32 - G32, "mul": F32 * G32, "div": F32 / G32}[op]
    np.testing.assert_array_equal(binary(f"{op}.rn.f32", F32, G32, np.float32), want)


def test_directed_rounding():
    x, y = F32.astype(np.float64), G32.astype(np.float64)
    for way, compare in (("rm", np.less_equal), ("rp", np.greater_equal)):
        got = binary(f"add.{way}.f32", F32, G32, np.float32).astype(np.float64)
        assert compare(got, x + y).all() and (np.abs(got - (x + y)) <= np.spacing(np.abs(got).astype(np.float32))).all()


@pytest.mark.parametrize("form, dtype", [("bf16", torch.bfloat16), ("f16", torch.float16)], ids=["bf16", "f16"])
def test_conversion_to_16_bits(form, dtype):
    x = torch.cat([torch.randn(24) * 1e3, torch.tensor([0.0, -0.0, 1e-8, 65504.0, 65520.0, float("inf"), 1e30, -3e-5])])
    got = unary(f"cvt.rn.{form}.f32", x.numpy(), out=np.uint16)
    np.testing.assert_array_equal(got, x.to(dtype).view(torch.uint16).numpy())


@pytest.mark.parametrize("form, dtype", [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_every_fp8_code(form, dtype):
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(8, 32)
    for row in codes:
        got = unary(f"cvt.rn.f16x2.{form}x2", row.numpy().astype(np.uint16)) & 0xFFFF
        want = row.view(dtype).to(torch.float16)
        same = torch.from_numpy(got.astype(np.uint16)).view(torch.float16)
        assert torch.equal(same.nan_to_num(7.0), want.nan_to_num(7.0))


@pytest.mark.parametrize("form, dtype", [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_conversion_to_fp8_saturates(form, dtype):
    x = torch.cat([torch.randn(28) * 100, torch.tensor([1e6, -1e6, 448.0, 464.0])])
    limit = torch.finfo(dtype).max
    result = np.zeros(32, np.uint16)
    body = """
        ld.param.u64 %rd8, [p0]; ld.param.u64 %rd9, [p1]; mov.u32 %r8, %tid.x; mad.wide.u32 %rd8, %r8, 4, %rd8;
        mad.wide.u32 %rd9, %r8, 2, %rd9; ld.global.f32 %r1, [%rd8]; mov.b32 %r2, 0f00000000;
        cvt.rn.satfinite.FORMx2.f32 %h1, %r2, %r1; st.global.b16 [%rd9], %h1;""".replace("FORM", form)
    run(body, x.numpy(), result)
    np.testing.assert_array_equal(result, x.clamp(-limit, limit).to(dtype).view(torch.uint8).numpy())


def test_divergence_reconverges():
    """Lanes leave a loop one after the other; then all vote together."""
    result = np.zeros(32, np.uint32)
    run(
        """
        ld.param.u64 %rd9, [p0]; mov.u32 %r8, %tid.x; mad.wide.u32 %rd9, %r8, 4, %rd9; mov.b32 %r1, 0; mov.b32 %r2, 0;
        LOOP: add.s32 %r1, %r1, %r2; add.s32 %r2, %r2, 1; setp.le.u32 %p1, %r2, %r8; @%p1 bra LOOP;
        setp.ne.b32 %p2, %r1, -1; vote.sync.ballot.b32 %r3, %p2, -1; setp.ne.b32 %p3, %r3, -1; @%p3 trap;
        st.global.b32 [%rd9], %r1;""",
        result,
    )
    np.testing.assert_array_equal(result, np.arange(32) * (np.arange(32) + 1) // 2)


def test_ctas_wait_for_each_other():
    """A CTA spins until the last one has arrived: all of them must run at once."""
    flags = np.zeros(2, np.uint32)
    body = """
        ld.param.u64 %rd1, [p0]; atom.global.add.u32 %r1, [%rd1], 1;
        SPIN: ld.acquire.gpu.global.b32 %r2, [%rd1]; setp.lt.u32 %p1, %r2, 8; @%p1 bra SPIN;
        red.global.add.u32 [%rd1+4], 1;"""
    for policy in ("eager", "random1"):
        flags[:] = 0
        run(body, flags, block=1, grid=8, policy=policy)
        assert flags.tolist() == [8, 8]


SHARED = ".extern .shared .align 1024 .b8 s[];"
EXCHANGE = """
    ld.param.u64 %rd1, [p0]; mov.u32 %r1, %tid.x; mad.wide.u32 %rd1, %r1, 4, %rd1; mov.b32 %r2, s;
    shl.b32 %r3, %r1, 2; add.s32 %r4, %r2, %r3; st.shared.b32 [%r4], %r1;
    bar.sync 0;
    xor.b32 %r5, %r3, 128; add.s32 %r5, %r5, %r2; ld.shared.b32 %r6, [%r5]; st.global.b32 [%rd1], %r6;"""


def test_races_are_found():
    out = np.zeros(64, np.uint32)
    result = run(EXCHANGE, out, block=64, smem=256, shared=SHARED, policy="eager+race")
    assert result.reports == [] and out.tolist() == [i ^ 32 for i in range(64)]
    result = run(EXCHANGE.replace("bar.sync 0;", ""), out, block=64, smem=256, shared=SHARED, policy="eager+race")
    assert result.reports and "race in shared memory" in result.reports[0]


COPY = """
    ld.param.u64 %rd1, [p1]; mov.b32 %r2, s; mov.b32 %r9, 1; mov.b32 %r10, BYTES; mov.b64 %rd2, p0; mov.u32 %r1, %tid.x;
    setp.ne.b32 %p1, %r1, 0; @%p1 bra WAIT;
    mbarrier.init.shared::cta.b64 [%r2], %r9;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], %r10; add.s32 %r3, %r2, 1024; mov.b32 %r4, 0;
    cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r3], [%rd2, {%r4, ROW}], [%r2];
    WAIT: bar.sync 0;
    TRY: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0; @!%p2 bra TRY;
    shl.b32 %r5, %r1, 4; add.s32 %r6, %r2, %r5; ld.shared.v4.b32 {%r11, %r12, %r13, %r14}, [%r6+1024];
    mad.wide.u32 %rd1, %r1, 16, %rd1; st.global.v4.b32 [%rd1], {%r11, %r12, %r13, %r14};"""


@pytest.mark.parametrize("policy", ["eager+race", "late", "random1+race"])
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("row", [0, 3, -2])
def test_tensor_copies_swizzle_and_fill_with_zeros(policy, swizzle, row):
    width = (swizzle or 64) // 2
    x = torch.arange(12 * width, dtype=torch.int16).view(12, width).view(torch.bfloat16)
    out = torch.zeros(8, width, dtype=torch.int16)
    body = COPY.replace("BYTES", str(16 * width)).replace("ROW", str(row))
    text = program(body, ".param .align 64 .b8 p0[128], .param .u64 p1", SHARED)
    params = [encode(x, (width, 8), swizzle), out]
    launch(text, "k", 1, 16 * width // 16, 8192, params, read_only=[x], policy=policy)
    want = torch.zeros(8, width, dtype=torch.int16)
    for i in range(8):
        if 0 <= i + row < 12:
            want[i] = x.view(torch.int16)[i + row]
    span = swizzle or 16
    for i in range(8):  # undo the swizzle, chunk by chunk, from its definition
        for c in range(width // 8):
            at = i * width * 2 + c * 16
            moved = at ^ ((at >> 7 & (span // 16 - 1)) << 4)
            assert torch.equal(out.view(-1)[moved // 2 : moved // 2 + 8], want[i, 8 * c : 8 * c + 8])


def test_deadlock_names_what_is_missing():
    x, out = torch.zeros(12, 64, dtype=torch.bfloat16), torch.zeros(8, 64, dtype=torch.int16)
    text = program(
        COPY.replace("BYTES", "1040").replace("ROW", "0"), ".param .align 64 .b8 p0[128], .param .u64 p1", SHARED
    )
    with pytest.raises(DeadlockError, match=r"parity 0 of the mbarrier at shared \+0.*0 of 1 arrivals and 16 bytes"):
        launch(text, "k", 1, 64, 8192, [encode(x, (64, 8), 128), out], read_only=[x])


@pytest.mark.parametrize(
    "body, message",
    [
        ("ld.param.u64 %rd1, [p0]; ld.global.b32 %r1, [%rd1+128];", "outside the tensors given"),
        ("ld.param.u64 %rd1, [p0]; ld.global.b64 %rd2, [%rd1+4];", "misaligned"),
        ("mov.b32 %r1, 4096; st.shared.b32 [%r1], %r1;", "outside shared memory"),
        ("mov.b32 %r1, 1024; mbarrier.arrive.shared::cta.b64 _, [%r1];", "before its init"),
        ("mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 7; @%p1 bar.sync 0;", "diverged"),
        ("mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 7; @%p1 shfl.sync.idx.b32 %r2, %r1, 0, 31, -1;", "another path"),
    ],
)
def test_what_hardware_forbids_is_an_error(body, message):
    with pytest.raises(EmulatorError, match=f"PTX line.*{message}"):
        run(body, np.zeros(32, np.uint32), smem=1024, shared=SHARED)


def test_writes_go_to_outputs_only():
    x = np.zeros(32, np.uint32)
    body = "ld.param.u64 %rd1, [p0]; st.global.b32 [%rd1], 7;"
    with pytest.raises(EmulatorError, match="isn't an output"):
        run(body, int(x.ctypes.data), read_only=[x])
    run(body, int(x.ctypes.data), memory=[x])
    assert x[0] == 7


@pytest.mark.parametrize(
    "body, message",
    [
        ("frobnicate.b32 %r1, %r2;", "PTX line 7: frobnicate.b32 %r1, %r2: not implemented"),
        ("add.sat.s32 %r1, %r2, %r3;", "modifier .sat"),
        ("tcgen05.shift.cta_group::1.down [%r1];", "not implemented"),
        ("ld.global.b32 %r1, [%rd1", "unfinished|not implemented"),
        ("bra NOWHERE;", "no such label"),
    ],
)
def test_unknown_forms_are_refused(body, message):
    with pytest.raises(Unsupported, match=message):
        load(program(body), "k")


def test_bad_launches_are_refused():
    text, out = program("", ".param .u64 a"), np.zeros(4, np.uint32)
    with pytest.raises(ValueError, match="1 parameters, 2 were given"):
        launch(text, "k", 1, 32, 0, [out, 1])
    with pytest.raises(ValueError, match="has 8 bytes, 4 were given"):
        launch(text, "k", 1, 32, 0, [b"1234"])
    with pytest.raises(ValueError, match="no entry other"):
        launch(text, "other", 1, 32, 0, [out])
    with pytest.raises(EmulatorError, match="multiple of the cluster"):
        launch(text, "k", 3, 32, 0, [out], cluster=(2, 1, 1))
    with pytest.raises(ValueError, match="threads a CTA"):
        launch(text.replace(") {", ") .reqntid 64, 1, 1 {", 1), "k", 1, 32, 0, [out])
    with pytest.raises(ValueError, match="takes 8 bytes of parameters, got 4"):
        launch(text, "k", 1, 32, 0, b"1234")
    copy = program(
        COPY.replace("BYTES", "1024").replace("ROW", "0"), ".param .align 64 .b8 p0[128], .param .u64 p1", SHARED
    )
    for given, message in (
        (bytes(128), "no tensor map: these 128 bytes are zero"),
        (b"\x7f" * 128, "are no tensor map"),
    ):
        with pytest.raises(EmulatorError, match=rf"k: CTA \(0, 0, 0\) warp 0 PTX line \d+: .*{message}"):
            launch(copy, "k", 1, 64, 8192, [given, torch.zeros(512, dtype=torch.int16)])


LANES = np.arange(32, dtype=np.uint32)
OWN = "ld.param.u64 %rd1, [p0]; mov.u32 %r1, %tid.x; mad.wide.u32 %rd1, %r1, 4, %rd1; mov.b32 %r4, s;"
AT = "shl.b32 %r5, %r1, {}; add.s32 %r5, %r5, %r4;"  # %r5: this lane's place in shared memory


@pytest.mark.parametrize(
    "body, want",
    [
        ("redux.sync.add.s32 %r3, %r1, -1;", np.full(32, 496)),
        ("redux.sync.max.u32 %r3, %r1, -1;", np.full(32, 31)),
        ("and.b32 %r2, %r1, 3; match.any.sync.b32 %r3, %r2, -1;", np.array([0x11111111 << (i & 3) for i in range(32)])),
        ("elect.sync %r3|%p1, -1; selp.b32 %r3, 1, 0, %p1;", LANES == 0),
        ("griddepcontrol.wait; griddepcontrol.launch_dependents; mov.b32 %r3, %r1;", LANES),
        (AT.format(0) + "st.shared.u8 [%r5], -1; bar.sync 0; ld.shared.s8 %r3, [%r5];", np.full(32, 0xFFFFFFFF)),
        (AT.format(0) + "st.shared.u8 [%r5], -1; bar.sync 0; ld.shared.u8 %r3, [%r5];", np.full(32, 0xFF)),
        ("st.shared.b32 [%r4], 3; bar.sync 0; atom.shared.add.u32 %r3, [%r4], 2;", 3 + 2 * LANES),
        ("st.shared.b32 [%r4], 0; bar.sync 0; atom.shared.max.u32 %r3, [%r4], %r1;", np.maximum(LANES, 1) - 1),
        (
            "cvt.u64.u32 %rd3, %r4; cvta.shared.u64 %rd3, %rd3; st.u32 [%rd3], 9; bar.sync 0; ld.shared.b32 %r3, [%r4];",
            np.full(32, 9),
        ),
        (  # lane l gives row l of 8 numbers of 16 bits, and gets two of row l / 4
            AT.format(4) + "st.shared.v4.b32 [%r5], {%r1, %r1, %r1, %r1}; bar.sync 0;"
            "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r3}, [%r5];",
            LANES // 4,
        ),
        (
            "and.b32 %r5, %r1, 7; shl.b32 %r5, %r5, 4; add.s32 %r5, %r5, %r4;"
            "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r5], {%r1}; bar.sync 0;"
            + AT.format(2)
            + "ld.shared.b32 %r3, [%r5];",
            LANES,
        ),
        # What nobody wrote: all ones, a NaN or -1.
        ("ld.shared.b32 %r3, [%r4+64];", np.full(32, 0xFFFFFFFF)),
        ("mov.b32 %r3, %r39;", np.full(32, 0xFFFFFFFF)),
    ],
    ids=lambda x: x.split(";")[-2].split()[0] if isinstance(x, str) else "",
)
def test_within_a_warp(body, want):
    out = np.full(32, 7, np.uint32)
    run(f"{OWN} {body} st.global.b32 [%rd1], %r3;", out, smem=1024, shared=SHARED)
    np.testing.assert_array_equal(out, want.astype(np.uint32))


def test_a_seed_replays_its_schedule():
    """Eight warps of two CTAs take numbers: in the same order with the same seed, in another with another."""
    body = """
        ld.param.u64 %rd1, [p0]; mov.u32 %r1, %tid.x; shr.u32 %r1, %r1, 5; mov.u32 %r2, %ctaid.x; shl.b32 %r2, %r2, 3;
        add.s32 %r1, %r1, %r2; atom.global.add.u32 %r3, [%rd1], 1; mad.wide.u32 %rd2, %r3, 4, %rd1;
        st.global.b32 [%rd2+4], %r1;"""

    def order(policy):
        out = np.zeros(17, np.uint32)
        threads = body.replace("mov.u32 %r1, %tid.x;", "mov.u32 %r1, %tid.x; and.b32 %r4, %r1, 31;")
        threads = threads.replace("atom", "setp.ne.u32 %p1, %r4, 0; @%p1 bra DONE; atom") + "DONE:"
        run(threads, out, block=256, grid=2, policy=policy)
        assert out[0] == 16 and sorted(out[1:].tolist()) == list(range(16))
        return out[1:].tolist()

    orders = [order(f"random{seed}") for seed in range(6)]
    assert orders == [order(f"random{seed}") for seed in range(6)]
    assert len({tuple(x) for x in orders}) > 1


MMA = """
    ld.param.u64 %rd1, [p0]; ld.param.u64 %rd2, [p1]; ld.param.u64 %rd3, [p2]; mov.u32 %r1, %tid.x;
    mad.wide.u32 %rd1, %r1, 16, %rd1; mad.wide.u32 %rd2, %r1, 8, %rd2; mad.wide.u32 %rd3, %r1, 16, %rd3;
    ld.global.v4.b32 {%r2, %r3, %r4, %r5}, [%rd1]; ld.global.v2.b32 {%r6, %r7}, [%rd2]; mov.b32 %r8, 0f00000000;
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r9, %r10, %r11, %r12}, {%r2, %r3, %r4, %r5}, {%r6, %r7},
    {%r8, %r8, %r8, %r8}; st.global.v4.b32 [%rd3], {%r9, %r10, %r11, %r12};"""


def test_mma_sync():
    a, b = torch.randn(16, 16).bfloat16(), torch.randn(16, 8).bfloat16()
    fa, fb, fd = torch.zeros(32, 8).bfloat16(), torch.zeros(32, 4).bfloat16(), torch.zeros(32, 4)
    for lane in range(32):
        g, t = lane // 4, lane % 4
        for i in range(8):  # the manual's formulas for m16n8k16
            fa[lane, i] = a[g + 8 * (i // 2 % 2), 2 * t + i % 2 + 8 * (i // 4)]
        for i in range(4):
            fb[lane, i] = b[2 * t + i % 2 + 8 * (i // 2), g]
    run(MMA, fa, fb, fd)
    want = a.double() @ b.double()
    for lane in range(32):
        for i in range(4):
            assert abs(fd[lane, i] - want[lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2]) < 1e-4


@pytest.mark.parametrize("policy", ["eager", "random1"])
def test_spinning_for_ever_is_a_deadlock_and_long_work_is_not(policy):
    flag = np.zeros(1, np.uint32)
    spin = "ld.param.u64 %rd1, [p0]; SPIN: ld.global.b32 %r1, [%rd1]; setp.eq.b32 %p1, %r1, 0; @%p1 bra SPIN;"
    with pytest.raises(DeadlockError, match="spin and nothing changes|limit of instructions"):
        run(spin, flag, block=32, policy=policy)
    work = """ld.param.u64 %rd1, [p0]; mov.b32 %r1, 0; WORK: add.s32 %r1, %r1, 1; setp.lt.s32 %p1, %r1, 100000;
        @%p1 bra WORK; st.global.b32 [%rd1], %r1;"""
    run(work, flag, block=1, policy=policy)
    assert flag[0] == 100000
