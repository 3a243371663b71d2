"""The neutral programs on every architecture: the launcher picks the device's image, and the results have the same bits.

Needs `--backend=emulated`. The images of a neutral program are one PTX text but for the target, which the first test shows;
so what the other files show on sm_90 (every basic block, schedules, faults) holds for all, and what they show of SM100's own
programs holds for SM103. Any of those files runs on another device with `--device sm_100`.
"""

import re
from collections import Counter
from pathlib import Path

import cases
import oracle
import pytest
import torch

import m3_sparse
from m3_sparse import ops

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
DEVICES = ("sm_90", "sm_100", "sm_103")
TESTED_ON_SM103 = {"prefill", "prefill_union"}
NEUTRAL = {path.stem for path in (Path(__file__).parent.parent / "kernel-src" / "neutral").glob("*.py")}


def text_of(driver, name, arch):
    text = (driver.kernels / f"{name}.ptx").read_text()
    return text.replace(arch.replace("_", ""), "ARCH").replace(arch, "ARCH")


def texts(driver, neutral):
    """{program: {architecture: PTX without the architecture's name}} of the neutral programs, or of the others."""
    found = {}
    for facts in driver.manifests.values():
        if (facts["kernel"] in NEUTRAL) == neutral:
            found.setdefault(facts["program"], {})[facts["arch"]] = text_of(driver, facts["name"], facts["arch"])
    return found


def test_neutral_programs_are_the_same_but_for_the_name(emulation):
    found = texts(emulation.driver, True)
    assert len(found) > 40
    for program, by_arch in found.items():
        assert set(by_arch) == {"sm_90a", "sm_100a", "sm_103a"}, program
        assert len(set(by_arch.values())) == 1, f"{program} differs between architectures"


def instructions(text):
    """The instructions of a program without registers, labels and copies between registers, in no order."""
    text = re.sub(r"\$L__BB\d+_\d+", "LABEL", re.sub(r"%[a-z]+\d+", "%r", text))
    lines = [line.strip() for line in text.splitlines()]
    skipped = ("", "mov.b32 \t%r, %r;", "mov.b64 \t%rd, %rd;")
    return Counter(line for line in lines if line not in skipped and not line.startswith(("//", ".reg")))


def test_sm103_programs_are_those_of_sm100(emulation):
    """One text, or two of the forms in which one and the same MLIR may come out (docs/aot.md). A kernel whose programs differ
    needs emulated tests of its own; it is listed here once it has them."""
    driver, found = emulation.driver, 0
    kernels = {facts["program"]: facts["kernel"] for facts in driver.manifests.values()}
    for program, by_arch in texts(driver, False).items():
        if "sm_100a" not in by_arch or kernels[program] in TESTED_ON_SM103:
            continue
        found += 1
        one, other = by_arch["sm_100a"], by_arch["sm_103a"]
        assert one == other or instructions(one) == instructions(other), f"{program} differs"
    assert found >= 21


@pytest.mark.parametrize("dtypes", [(BF16, BF16), (FP16, FP16), (BF16, E4M3), (FP16, E4M3), (E4M3, E4M3)], ids=str)
def test_prefill_scores_of_sm103(emulation, dtypes):
    """The kernel whose text varies, on both."""
    case = cases.make([20], [2700], heads=(4, 4), dtype=dtypes[0], kv_dtype=dtypes[1])
    (query, keys, table), lengths = case.index()

    def call(topk, way, scores=None):
        out = torch.full((*query.shape[:2], topk), -77, dtype=torch.int32)
        select = ops.BUILT["select_blocks", "aot"]
        select(out, scores, query, keys, table, *lengths.values(), 1, 0, way)
        return out

    found = {}
    for device in ("sm_100", "sm_103"):
        with emulation.device(device, 2), emulation.policy("random1"):
            scores = cases.nan_like((*query.shape[:2], table.shape[1]), torch.float32)  # pages of 128
            found[device] = [call(4, 3), call(17, 3), call(4, 2, scores), scores]
    for one, other in zip(*found.values()):
        assert torch.equal(oracle.stored_bytes(one), oracle.stored_bytes(other))
    assert torch.equal(found["sm_100"][0], found["sm_100"][2])


def every_device(emulation, call):
    """The results of `call` on each device, which must have the same bits; and the entries that were launched."""
    results, entries = {}, {}
    for device in DEVICES:
        before = dict(emulation.driver.programs)
        emulation.driver.programs.clear()
        with emulation.device(device), emulation.policy("random2+race"), m3_sparse.backend("aot"):
            results[device] = call()
        entries[device] = set(emulation.driver.programs)
        emulation.driver.programs.update({**before, **emulation.driver.programs})
        assert entries[device] and all(entry.endswith(f"_{device.replace('_', '')}a_0") for entry in entries[device])
        for one, other in zip(results[device], results["sm_90"]):
            assert torch.equal(oracle.stored_bytes(one), oracle.stored_bytes(other)), device
    programs = [{entry.replace(f"_{d.replace('_', '')}a_0", "") for entry in entries[d]} for d in DEVICES]
    assert programs[0] == programs[1] == programs[2]
    return results["sm_90"], programs[0]


@pytest.mark.parametrize("splits", [1, 2, 4, 16])
@pytest.mark.parametrize("dtypes", [(BF16, BF16), (FP16, E4M3)], ids=["bf16", "fp8"])
def test_decode(emulation, dtypes, splits):
    case = cases.make([1, 2], [300, 700], heads=(32, 2), page=64, dtype=dtypes[0], kv_dtype=dtypes[1])
    (q, k_cache, v_cache, ids, table), options = case.sparse()
    lengths = (options["cu_seqlens_q"], options["seqused_k"])

    def call():
        out, lse = cases.nan_like(q.shape, q.dtype), cases.nan_like(q.shape[:2], torch.float32)
        attend = ops.BUILT["sparse_attention", "aot"]
        attend(out, lse, q, k_cache, v_cache, ids, table, *lengths, 128**-0.5, True, None, None, splits)
        return out, lse

    got, programs = every_device(emulation, call)
    args, options = case.sparse()
    oracle.check_attention(*got, *oracle.sparse_attention(*args, **options))
    assert len(programs) == 1


@pytest.mark.parametrize("dtypes", [(BF16, BF16), (BF16, E4M3), (FP16, E4M3)], ids=lambda d: str(d[1])[6:])
@pytest.mark.parametrize("blocks", [9, 250])  # as the top-k programs for narrow and wide rows
def test_select_blocks(emulation, dtypes, blocks):
    case = cases.make([1, 3], [128 * blocks - 5, 300], heads=(4, 4), dtype=dtypes[0], kv_dtype=dtypes[1], seed=blocks)
    tensors, lengths = case.index()
    call = lambda: m3_sparse.select_blocks(*tensors, **lengths, topk=8, return_scores=True)
    (ids, scores), programs = every_device(emulation, call)
    want, epsilon = oracle.block_scores(*tensors, **lengths), oracle.score_epsilon(*tensors, **lengths)
    seen = want > -torch.inf
    assert torch.equal(scores == -torch.inf, ~seen)
    assert ((scores.double() - want).abs() <= epsilon[..., None])[seen].all()
    counts = oracle.candidates(*lengths.values(), tensors[2], tensors[1].shape[1], tensors[0].shape[0])
    assert torch.equal(ids, oracle.select(scores.double(), counts, topk=8))
    assert len(programs) == 2


@pytest.mark.parametrize("kept", [BF16, E4M3], ids=lambda d: str(d)[6:])
def test_store_kv(emulation, kept):
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(3, 9, 2, 128, generator=generator).to(BF16)
    slots = torch.randperm(3 * 64, generator=generator)[:9]
    slots[4] = -1

    def arguments():
        caches = [torch.zeros(3, 2, 64, 128).to(kept), torch.zeros(3, 2, 64, 128).to(kept), torch.zeros(3, 64, 128)]
        return [rows[0], rows[1], rows[2, :, 0], *caches[:2], caches[2].to(kept), slots]

    def call():
        given = arguments()
        m3_sparse.store_kv(*given)
        return given[3:6]

    got, _ = every_device(emulation, call)
    for cache, expected in zip(got, oracle.store_kv(*arguments())):
        assert torch.equal(oracle.stored_bytes(cache), expected)


def test_merge_states(emulation):
    generator = torch.Generator().manual_seed(2)
    outs, lses = torch.randn(3, 5, 4, 128, generator=generator), torch.randn(3, 5, 4, generator=generator)
    got, _ = every_device(emulation, lambda: m3_sparse.merge_states(outs, lses, out_dtype=BF16))
    oracle.check_attention(*got, *oracle.merge_states(outs, lses))


def test_union_lists(emulation):
    case = cases.make([9, 5], [600, 300], heads=(32, 2), dtype=BF16, topk=4)
    (q, k_cache, _, ids, table), options = case.sparse()
    lengths = (options["cu_seqlens_q"], options["seqused_k"])
    lists = emulation.wrapped(getattr(ops, "ops", ops).aot_union_lists.default)
    _, programs = every_device(emulation, lambda: [lists(q, k_cache, ids, table, *lengths, True, 1.5)])
    assert programs == {"m3s_union_lists", "m3s_union_choice"}
