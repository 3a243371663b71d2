"""The PTX emulator's bulk copies, clusters, proxies and wgmma, on small programs after the manual's definitions."""

import numpy as np
import pytest
import torch
from ptx_emulator.launch import DeadlockError, EmulatorError, launch
from ptx_emulator.tensor_map import encode

HEAD = ".version 9.0\n.target sm_90a\n.address_size 64\n.extern .shared .align 1024 .b8 s[];\n"
REGISTERS = ".reg .pred %p<9>; .reg .b16 %h<9>; .reg .b32 %r<99>; .reg .b64 %rd<20>;"
POLICIES = ["eager+race", "late+race", "random1+race", "random2+race"]


def run(body, params, policy, declared=None, block=32, grid=1, smem=8192, **options):
    declared = declared or ", ".join(f".param .u64 p{i}" for i in range(len(params)))
    text = f"{HEAD}.visible .entry k({declared}) {{\n{REGISTERS}\n{body}\nret;\n}}\n"
    return launch(text, "k", grid, block, smem, params, policy=policy, **options)


BULK = """
    ld.param.u64 %rd1, [p0]; ld.param.u64 %rd2, [p1]; mov.b32 %r1, s; mov.u32 %r2, %tid.x; mov.b32 %r3, 1;
    mov.b32 %r4, 512;
    setp.ne.b32 %p1, %r2, 0; @%p1 bra WAIT;
    mbarrier.init.shared::cta.b64 [%r1], %r3; mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], %r4;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1+1024], [%rd1], %r4, [%r1];
    WAIT: bar.warp.sync -1;
    TRY: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1], 0; @!%p2 bra TRY;
    shl.b32 %r5, %r2, 4; add.s32 %r6, %r1, %r5; ld.shared.v4.f32 {%r7, %r8, %r9, %r10}, [%r6+1024];
    add.f32 %r7, %r7, %r7; st.shared.v4.f32 [%r6+1024], {%r7, %r8, %r9, %r10};
    fence.proxy.async.shared::cta; bar.warp.sync -1; @%p1 bra END;
    STORE [%rd2], [%r1+1024], %r4; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    END: """
STORES = {
    "store": "cp.async.bulk.global.shared::cta.bulk_group",
    "add": "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32",
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("store", STORES)
def test_bulk_copies_and_reductions(policy, store):
    x, out = torch.randn(128), torch.ones(128)
    result = run(BULK.replace("STORE", STORES[store]), [x, out], policy)
    want = x.clone()
    want[::4] *= 2
    assert torch.equal(out, want + 1 if store == "add" else want) and result.reports == []


def test_a_missing_proxy_fence_is_reported():
    body = BULK.replace("STORE", STORES["store"])
    result = run(body.replace("fence.proxy.async.shared::cta;", ""), [torch.randn(128), torch.ones(128)], "eager")
    assert len(result.reports) == 1 and "no fence.proxy.async between a generic write by warp 0" in result.reports[0]


def test_an_exit_before_a_store_is_complete_is_reported():
    body = BULK.replace("STORE", STORES["store"]).replace("cp.async.bulk.wait_group 0;", "")
    assert run(body, [torch.randn(128), torch.ones(128)], "eager").reports == []
    result = run(body, [torch.randn(128), torch.ones(128)], "late:bulk store")
    assert result.reports == ["the CTA exits before its asynchronous operation (bulk store) is complete"]


# Every CTA of a cluster writes its number into the next one's shared memory, and reads its own.
CLUSTER = """
    ld.param.u64 %rd1, [p0]; mov.b32 %r1, s; mov.u32 %r2, %cluster_ctarank; mov.u32 %r3, %cluster_nctarank;
    mov.u32 %r4, %tid.x; mov.u32 %r12, %ctaid.x;
    add.s32 %r5, %r2, 1; rem.u32 %r5, %r5, %r3; mapa.shared::cluster.u32 %r6, %r1, %r5;
    shl.b32 %r7, %r4, 2; add.s32 %r8, %r6, %r7; mad.lo.s32 %r9, %r12, 100, %r4; st.shared::cluster.b32 [%r8], %r9;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    add.s32 %r10, %r1, %r7; ld.shared.b32 %r11, [%r10];
    mad.lo.s32 %r13, %r12, 32, %r4; mad.wide.u32 %rd1, %r13, 4, %rd1; st.global.b32 [%rd1], %r11;"""


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("size", [2, 4])
def test_clusters_share_memory(policy, size):
    out = np.zeros((8, 32), np.uint32)
    result = run(CLUSTER, [out], policy, grid=8, cluster=size)
    for cta in range(8):
        before = cta // size * size + (cta - 1) % size
        np.testing.assert_array_equal(out[cta], 100 * before + np.arange(32))
    assert result.reports == []


def test_a_missing_cluster_barrier_is_noticed():
    out = np.zeros((2, 32), np.uint32)
    with pytest.raises(EmulatorError, match="CTA 0 of the cluster has exited"):
        run(
            CLUSTER.replace("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;", ""),
            [out],
            "eager",
            grid=2,
            cluster=2,
        )
    relaxed = CLUSTER.replace("barrier.cluster.arrive.aligned", "barrier.cluster.arrive.relaxed.aligned")
    result = run(relaxed, [out], "eager+race", grid=2, cluster=2)
    assert result.reports and all("race in shared memory" in r for r in result.reports)


# CTA 0 loads one box into both CTAs of its cluster, each of which waits at its own mbarrier.
MULTICAST = """
    ld.param.u64 %rd1, [p1]; mov.b64 %rd2, p0; mov.b32 %r1, s; mov.u32 %r2, %cluster_ctarank; mov.u32 %r4, %tid.x;
    mov.b32 %r3, 1; mov.b32 %r5, 1024; mov.b16 %h1, MASK; mov.b32 %r9, 0; setp.ne.b32 %p1, %r4, 0; @%p1 bra READY;
    mbarrier.init.shared::cta.b64 [%r1], %r3; mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], %r5;
    fence.mbarrier_init.release.cluster;
    READY: bar.warp.sync -1; barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    or.b32 %r6, %r2, %r4; setp.ne.b32 %p2, %r6, 0; @%p2 bra TRY;
    cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
        [%r1+1024], [%rd2, {%r9, %r9}], [%r1], %h1;
    TRY: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r1], 0; @!%p3 bra TRY;
    shl.b32 %r7, %r4, 5; add.s32 %r8, %r1, %r7; ld.shared.v4.b32 {%r11, %r12, %r13, %r14}, [%r8+1024];
    ld.shared.v4.b32 {%r15, %r16, %r17, %r18}, [%r8+1040];
    mad.lo.s32 %r20, %r2, 32, %r4; mad.wide.u32 %rd1, %r20, 32, %rd1; st.global.v4.b32 [%rd1], {%r11, %r12, %r13, %r14};
    st.global.v4.b32 [%rd1+16], {%r15, %r16, %r17, %r18};"""


@pytest.mark.parametrize("policy", POLICIES)
def test_multicast(policy):
    x, out = torch.randn(8, 32), torch.zeros(2, 8, 32)
    declared = ".param .align 64 .b8 p0[128], .param .u64 p1"
    result = run(
        MULTICAST.replace("MASK", "3"), [encode(x, (32, 8)), out], policy, declared, grid=2, cluster=2, read_only=[x]
    )
    assert torch.equal(out, x.expand(2, 8, 32)) and result.reports == []
    with pytest.raises(DeadlockError, match="1024 bytes missing"):
        run(
            MULTICAST.replace("MASK", "1"),
            [encode(x, (32, 8)), out],
            policy,
            declared,
            grid=2,
            cluster=2,
            read_only=[x],
        )
    with pytest.raises(EmulatorError, match="multicast mask 0x7"):
        run(
            MULTICAST.replace("MASK", "7"),
            [encode(x, (32, 8)), out],
            policy,
            declared,
            grid=2,
            cluster=2,
            read_only=[x],
        )


def wgmma_program(kind, n, k, element, a_mn, b_mn):
    """One m64nNkK of A and B in shared memory, 128-byte swizzle, both filled through generic stores."""
    accumulators = ", ".join(f"%f{i}" for i in range(n // 2))
    stores = "".join(f"st.global.f32 [%rd3+{4 * 128 * i}], %f{i};" for i in range(n // 2))
    transposes = f", {a_mn}, {b_mn}" if element == 2 else ""
    return f"""
    .reg .f32 %f<{n // 2}>;
    ld.param.u64 %rd1, [p0]; ld.param.u64 %rd2, [p1]; mov.b32 %r1, s; mov.u32 %r2, %tid.x;
    shl.b32 %r3, %r2, 4; cvt.u64.u32 %rd4, %r3; add.s64 %rd5, %rd1, %rd4; add.s32 %r4, %r1, %r3; mov.b32 %r5, 0;
    COPY: ld.global.v4.b32 {{%r6, %r7, %r8, %r9}}, [%rd5]; st.shared.v4.b32 [%r4], {{%r6, %r7, %r8, %r9}};
    add.s64 %rd5, %rd5, 2048; add.s32 %r4, %r4, 2048; add.s32 %r5, %r5, 1; setp.lt.s32 %p1, %r5, 24; @%p1 bra COPY;
    fence.proxy.async.shared::cta; bar.sync 0;
    shr.u32 %r10, %r1, 4; cvt.u64.u32 %rd6, %r10; or.b64 %rd7, %rd6, DESCRIPTOR_A; add.s64 %rd8, %rd6, 1024;
    or.b64 %rd8, %rd8, DESCRIPTOR_B; setp.ne.b32 %p2, 0, 0;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{kind}.{kind} {{{accumulators}}}, %rd7, %rd8, %p2, 1, 1{transposes};
    wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
    mad.wide.u32 %rd3, %r2, 4, %rd2; {stores}"""


def placed(matrix, mn_major):
    """Bytes of an operand in a 128-byte swizzle: 8 rows of 128 bytes an atom, chunks of 16 bytes XORed with the row."""
    source = matrix.T.contiguous() if mn_major else matrix.contiguous()
    rows, width = source.shape
    raw = source.view(torch.uint8).view(rows, -1)
    out = torch.zeros(16384 if not mn_major else 32768, dtype=torch.uint8)
    for r in range(rows):
        for c in range(raw.shape[1] // 16):
            atom, inside = divmod(c, 8)
            at = atom * rows * 128 + r * 128 + inside * 16
            at ^= (at >> 7 & 7) << 4
            out[at : at + 16] = raw[r, 16 * c : 16 * c + 16]
    return out


@pytest.mark.parametrize("policy", ["eager+race", "late"])
@pytest.mark.parametrize("kind, a_mn, b_mn", [("bf16", 0, 0), ("bf16", 1, 1), ("f16", 0, 1), ("e4m3", 0, 0)])
def test_wgmma(policy, kind, a_mn, b_mn):
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "e4m3": torch.float8_e4m3fn}[kind]
    size, n = dtype.itemsize, 64
    k = 32 // size
    a, b = torch.randn(64, k).to(dtype), torch.randn(n, k).to(dtype)
    memory = torch.zeros(49152, dtype=torch.uint8)
    for at, (matrix, mn) in ((0, (a, a_mn)), (16384, (b, b_mn))):
        raw = placed(matrix, mn)[:16384]
        memory[at : at + 16384] = raw
    # The program adds the start; leading dimension, stride between groups of 8 rows or k, swizzle of 128 bytes.
    descriptor = 1 << 62 | (1024 >> 4) << 32 | (1024 >> 4) << 16
    out = torch.zeros(n // 2, 128)
    body = wgmma_program(kind, n, k, size, a_mn, b_mn).replace("DESCRIPTOR_A", str(descriptor))
    result = run(body.replace("DESCRIPTOR_B", str(descriptor)), [memory, out], policy, block=128, smem=49152)
    want = a.float().double() @ b.float().double().T
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        for i in range(n // 2):
            row, column = 16 * warp + lane // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (lane % 4) + i % 2
            assert abs(out[i, thread] - want[row, column]) < 1e-3
    assert result.reports == []
