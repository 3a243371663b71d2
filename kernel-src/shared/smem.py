"""Shared memory by 32-bit address: loads, stores, asynchronous copies into it, and the shared memory of a cluster's
CTAs.

Addresses are Int32 (the shared window); `base` is where the dynamic shared memory of the CTA starts.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from shared.ptx import asm


def base(alignment=1024):
    return Int32(cute.arch.get_dyn_smem(cutlass.Uint8, alignment=alignment).toint())


# ---- plain accesses


def load_f32(a):
    return asm("ld.shared.f32 $0, [$1];", "f", "r", [a])[0]


def load_i32(a):
    return asm("ld.shared.b32 $0, [$1];", "r", "r", [a])[0]


def load_f32x4(a):
    return asm("ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];", "ffff", "r", [a])


def load_i32x2(a):
    return asm("ld.shared.v2.b32 {$0, $1}, [$2];", "rr", "r", [a])


def load_i32x4(a):
    return asm("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", "rrrr", "r", [a])


def store_f32(a, x):
    asm("st.shared.f32 [$0], $1;", "", "rf", [a, x])


def store_f32_if(a, x, ok):
    """Where `ok` (Int32) is not 0."""
    asm("{ .reg .pred p; setp.ne.s32 p, $2, 0; @p st.shared.f32 [$0], $1; }", "", "rfr", [a, x, ok])


def store_i32(a, x):
    asm("st.shared.b32 [$0], $1;", "", "rr", [a, x])


def store_i32_if(a, x, ok):
    """Where `ok` (Int32) is not 0."""
    asm("{ .reg .pred p; setp.ne.s32 p, $2, 0; @p st.shared.b32 [$0], $1; }", "", "rrr", [a, x, ok])


def or_i32_if(a, bits, ok):
    """Atomic, where `ok` is not 0."""
    asm("{ .reg .pred p; setp.ne.s32 p, $2, 0; @p red.shared.or.b32 [$0], $1; }", "", "rrr", [a, bits, ok])


def store_i32x2(a, x, y):
    asm("st.shared.v2.b32 [$0], {$1, $2};", "", "rrr", [a, x, y])


def store_i32x2_if(a, x, y, ok):
    text = "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.shared.v2.b32 [$0], {$1, $2}; }"
    asm(text, "", "rrrr", [a, x, y, ok])


def store_f32x2(a, x, y):
    asm("st.shared.v2.f32 [$0], {$1, $2};", "", "rff", [a, x, y])


def store_f32x4(a, v):
    asm("st.shared.v4.f32 [$0], {$1, $2, $3, $4};", "", "rffff", [a] + list(v))


def store_i32x4(a, v):
    asm("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", "", "rrrrr", [a] + list(v))


def atomic_or(a, bits):
    """Returns what was there before."""
    return asm("atom.shared.or.b32 $0, [$1], $2;", "r", "rr", [a, bits])[0]


# ---- asynchronous copies


def copy_async_16(target, source, valid_bytes):
    """16 bytes, of which `valid_bytes` (0 or 16) are read, the rest become zeros. Past L1: a KV byte is used once."""
    asm("cp.async.cg.shared.global.L2::128B [$0], [$1], 16, $2;", "", "rlr", [target, source, valid_bytes])


def copy_async_4(target, source, valid_bytes):
    """4 bytes, of which `valid_bytes` (0 or 4) are read."""
    asm("cp.async.ca.shared.global [$0], [$1], 4, $2;", "", "rlr", [target, source, valid_bytes])


def copies_commit():
    asm("cp.async.commit_group;", "", "", [])


def copies_wait(pending):
    """Until at most `pending` of this thread's newest groups are under way."""
    asm(f"cp.async.wait_group {pending};", "", "", [])


# ---- clusters


def of_rank(a, rank):
    """The address, in the cluster's window, of this CTA's address `a` in the CTA of that rank."""
    return asm("mapa.shared::cluster.u32 $0, $1, $2;", "r", "rr", [a, rank], False)[0]


def cluster_wait():
    asm("barrier.cluster.wait.acquire.aligned;", "", "", [])


def cluster_arrive_relaxed():
    """Orders nothing but the barrier itself (the releasing form costs a fence over all memory)."""
    asm("barrier.cluster.arrive.relaxed.aligned;", "", "", [])


# ---- mbarriers


def mbarrier_init(a, arrivals):
    """By one thread, followed by a barrier (of the cluster, if its other CTAs use it too)."""
    asm("mbarrier.init.shared::cta.b64 [$0], $1; fence.mbarrier_init.release.cluster;", "", "rr", [a, arrivals])


def mbarrier_expect(a, count):
    """One arrival that announces `count` bytes."""
    asm("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", "", "rr", [a, count])


def mbarrier_wait(a, parity, scope="cta"):
    """Until the phase of that parity is over. `scope` is "cluster" where other CTAs wrote what is waited for."""
    wait = f"mbarrier.try_wait.parity.acquire.{scope}.shared::cta.b64 p, [$0], $1;"
    asm("{ .reg .pred p; again: %s @p bra done; bra again; done: }" % wait, "", "rr", [a, parity])


def send_f32(a, x, mbarrier):
    """Asynchronous store to a CTA of the cluster; its mbarrier (both addresses from `of_rank`) counts the bytes."""
    asm("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [$0], $1, [$2];", "", "rfr", [a, x, mbarrier])


def send_f32x4(a, v, mbarrier):
    text = "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [$0], {$1, $2, $3, $4}, [$5];"
    asm(text, "", "rffffr", [a] + list(v) + [mbarrier])
