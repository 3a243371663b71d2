"""Faults that tests/test_emulated_faults.py puts into the kernels and that change nothing, each with the reason.

A fault is known again by its kind and by a part of the text around its instruction (ptx_emulator/faults.py: `around`), which
holds no numbers of registers, labels or lines. Every other fault must be noticed. One of these that is noticed, or whose place
is no longer there, fails the test too.
"""

import fnmatch
import typing


class Harmless(typing.NamedTuple):
    program: str  # a pattern: names as in docs/mutation.md
    kind: str
    at: str
    why: str

    def of(self, program):
        return fnmatch.fnmatchcase(program, self.program)

    def holds(self, program, mutant):
        return self.of(program) and self.kind == mutant.kind and self.at in mutant.around


ONE_TILE = "a launch has one tile a CTA: nobody waits for this stage again"
NO_COPIES = "the groups still pending have no copies: those of the last row or block were waited for in the loop"
ZEROS = "the copies still pending are zeros, for a row behind the last that nobody reads"
REPUBLISHED = (
    "the first tile's rows of V behind its length stay as they come: times 0 they are 0, or NaN, and then the tokens are "
    "computed again, as a tile of their own whose count is right"
)
STALE_REPORT = "a stale report has a token computed again, to the same bits; a tile of one token is not published again"
END_OF_UNITS = (
    "a unit is a tile at least and the end, two places in Q's ring: with three or fewer, the waits for Q's places have been "
    "for warps that had read the number before the last"
)
ENDS_WAIT = (
    "two ends, each of which has waited for a place in Q's ring of two: the last block's keys have been widened, by warps that "
    "had read the number before"
)
SAME_NUMBER = "the word has held this number since the first block"
OWN_ROWS = "a warp widens the 16 rows that its own part of the wgmma reads"
HARMLESS = (
    Harmless(
        "decode_bf16_s16",
        "proxy fence dropped",
        "add.s32 %r, %r, 4208; st.shared.v4.b32 [%r], {%r, %r, %r, %r}; $L:  >>",
        "with 16 CTAs a row a warp has one block, and copies no other to the place that it clears",
    ),
    Harmless(
        "decode_e4m3_s4",
        "cp.async wait dropped",
        ">> cp.async.wait_group 0;  bar.warp.sync 0xffffffff; mul.lo.s32 %r, %r, 144;",
        NO_COPIES,
    ),
    Harmless(
        "decode_e4m3_s4",
        "a group more may be pending",
        ">> cp.async.wait_group 0;  bar.warp.sync 0xffffffff; mul.lo.s32 %r, %r, 144;",
        NO_COPIES,
    ),
    Harmless("prefill_combine_bf16_r16", "cp.async wait dropped", ">> cp.async.wait_group 0;  $L: ret;", ZEROS),
    Harmless("prefill_combine_bf16_r16", "a group more may be pending", ">> cp.async.wait_group 0;  $L: ret;", ZEROS),
    Harmless("topk_*", "barrier dropped", ">> bar.sync 0;  $L: ret;", "it stands in front of the exit"),
    Harmless(
        "topk_wide",
        "shared store moved",
        "mov.b32 %r, -1; { .reg .pred p; setp.ne.s32 p, %r, 0; @p >> st.shared.v2.b32 [%r] , {%r, %r}; } bra.uni $L; }",
        "the list of the whole row, of which nobody reads what follows its k best",
    ),
    Harmless(
        "dense_bf16_m128",
        "barrier dropped",
        ">> bar.sync %r, 256;  shl.b32 %r, %r, 11;",
        "the warpgroups take turns at the tensor core by it; no data is passed",
    ),
    Harmless("dense_bf16_m128", "arrival dropped", "[__dynamic_shmem__0+163848]", ONE_TILE),
    Harmless(
        "dense_bf16_m128",
        "arrival dropped",
        "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; @%p bra $L; mov.b32 %r, 1;  >> mbarrier.arrive.shared.b64 %rd, [%r+163904]",
        ONE_TILE,
    ),
    Harmless("dense_bf16_m64", "arrival dropped", "[__dynamic_shmem__0+147464]", ONE_TILE),
    Harmless(
        "dense_bf16_m64",
        "arrival dropped",
        "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; @%p bra $L; mov.b32 %r, 1;  >> mbarrier.arrive.shared.b64 %rd, [%r+147520]",
        ONE_TILE,
    ),
    Harmless(
        "prefill_bf16_bf16_r16",
        "mbarrier wait dropped",
        "add.s32 %r, %r, 232096; { .reg .pred p; again: >> mbarrier.try_wait",
        END_OF_UNITS,
    ),
    Harmless(
        "prefill_bf16_e4m3_r8",
        "mbarrier wait dropped",
        "add.s32 %r, %r, 231968; { .reg .pred p; again: >> mbarrier.try_wait",
        END_OF_UNITS,
    ),
    Harmless("prefill_bf16_bf16_r16", "cp.async wait dropped", ">> cp.async.wait_group 0;", NO_COPIES),
    Harmless("prefill_bf16_bf16_r16", "a group more may be pending", ">> cp.async.wait_group 0;", NO_COPIES),
    Harmless("prefill_bf16_e4m3_r8", "cp.async wait dropped", ">> cp.async.wait_group 0;", NO_COPIES),
    Harmless("prefill_bf16_e4m3_r8", "a group more may be pending", ">> cp.async.wait_group 0;", NO_COPIES),
    Harmless(
        "prefill_bf16_bf16_r16",
        "arrival count",
        "add.s32 %r, %r, 229504;  >> mbarrier.init",
        "a barrier of raw blocks, of which a 16-bit cache has none",
    ),
    Harmless(
        "prefill_bf16_e4m3_r8",
        "arrival count",
        "add.s32 %r, %r, 229568;  >> mbarrier.init",
        "the barrier of a V that the loader cuts itself, which the widening warps do for float8",
    ),
    Harmless(
        "prefill_bf16_e4m3_r16 on SM100",
        "mbarrier wait dropped",
        "add.s32 %r, %r, 229536; { .reg .pred p; again: >> mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%r], %r; "
        "@p bra done; bra again; done: } @%p bra $L; mov.b32 %r, __dynamic_shmem__0; add.s32 %r, %r, 229576;",
        ENDS_WAIT,
    ),
    Harmless("prefill_bf16_e4m3_r16 on SM100", "cp.async wait dropped", ">> cp.async.wait_group 0;", NO_COPIES),
    Harmless("prefill_bf16_e4m3_r16 on SM100", "a group more may be pending", ">> cp.async.wait_group 0;", NO_COPIES),
    Harmless(
        "prefill_bf16_e4m3_r16 on SM100",
        "shared store moved",
        "_param_11]; cvta.param.u64 %rd, %rd; mov.b32 %r, __dynamic_shmem__0; add.s32 %r, %r, 229576; mov.b32 %r, 127;  >> st.shared.b32 [%r]",
        SAME_NUMBER,
    ),
    Harmless(
        "prefill_score_bf16_e4m3_top16 on SM100",
        "mbarrier wait dropped",
        "add.s32 %r, %r, 196768; { .reg .pred p; again: >> mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%r], %r; "
        "@p bra done; bra again; done: } @%p bra $L; shl.b32 %r, %r, 2;",
        "the end is published when the last tile's queries have come back, which is after all of its keys were widened",
    ),
    Harmless(
        "prefill_union_bf16",
        "shared load moved",
        "add.s32 %r, %r, 231424;  >> ld.shared.b32 %r, [%r] ; setp.eq.b32 %p, %r, 0;",
        REPUBLISHED,
    ),
    Harmless(
        "prefill_union_bf16",
        "shared store moved",
        ", 0; st.shared.v2.b32 [%r], {%r, %r}; add.s32 %r, %r, 231488;  >> st.shared.v4.b32",
        STALE_REPORT,
    ),
    Harmless(
        "prefill_union_e4m3",
        "barrier dropped",
        "fence.proxy.async.shared::cta; mov.b32 %r, 128;  >> bar.sync %r, %r;",
        OWN_ROWS,
    ),
    Harmless(
        "prefill_union_e4m3",
        "swizzle constant",
        ">> xor.b32 %r, %r, 64;  ld.shared.v4.b32 {%r, %r, %r, %r}, [%r]; add.s32 %r, %r, 17408;",
        "the lanes of a row trade 16 bytes that each of them widens in place: all are widened once, by the same factor",
    ),
    Harmless(
        "prefill_union_e4m3 on SM100",
        "mbarrier wait dropped",
        "add.s32 %r, %r, 231848; mov.b32 %r, 0; { .reg .pred p; again: >> mbarrier.try_wait",
        "the end is published when all records have come back, which is after their tiles were read from tensor memory",
    ),
)


def declared(program, mutant):
    """The declaration that a mutant comes under, or None."""
    return next((entry for entry in HARMLESS if entry.holds(program, mutant)), None)
