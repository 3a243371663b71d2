"""What isn't read can't matter, for the AOT kernels in the PTX emulator: test_unread.py. Needs `--backend=emulated`."""

import cases
import oracle
import pytest
import test_unread
from field_helpers import Backend
from test_unread import *

from m3_sparse import ops


@pytest.fixture(scope="module")
def backend(emulation):
    return Backend("aot")


@pytest.mark.parametrize("dtypes", test_unread.ATTENTION_DTYPES, ids=test_unread.name_of)
def test_sm100(emulation, dtypes):
    backend = Backend("aot")
    with emulation.device("sm_100"):
        test_unread.test_attention(backend, False, dtypes, "packed")
        if dtypes[0] == dtypes[1]:
            test_unread.test_attention(backend, True, dtypes, "nhd")
            test_unread.test_scales_and_empty_rows_beside_others(backend, float("nan"), "v_scale")
            test_unread.test_scales_and_empty_rows_beside_others(backend, float("inf"), "k_scale")
        test_unread.test_selection(backend, dtypes if dtypes[1] != torch.float8_e5m2 else (BF16, BF16), "padded")


def test_sm100_scales(emulation):
    backend = Backend("aot")
    with emulation.device("sm_100"):
        test_unread.test_scales_of_a_head_that_attends_to_nothing(backend, (BF16, E4M3))
        test_unread.test_scales_of_a_batch_without_tokens(backend)


def with_workspaces(device):
    """Outputs of operators that allocate, by name: formulations of sparse attention (launch/prefill.h), dense attention in
    splits, all ways of selection."""
    lists = {}
    for kv, formulations in ((BF16, (1, 2, 4)), (E4M3, (1, 2, 5 if device == "sm_90" else 4))):
        case = cases.make([40, 3, 20], [600, 255, 400], heads=(32, 2), dtype=BF16, kv_dtype=kv, topk=4, style="wild")
        (q, k_cache, v_cache, ids, table), options = case.sparse()
        lengths, scales = (options["cu_seqlens_q"], options["seqused_k"]), (options["k_scale"], options["v_scale"])
        for formulation in formulations:
            results = cases.nan_like(q.shape, q.dtype), cases.nan_like(q.shape[:2], torch.float32)
            call = ops.BUILT["sparse_attention", "aot"]
            call(*results, q, k_cache, v_cache, ids, table, *lengths, 128**-0.5, True, *scales, 0, True, formulation)
            lists[f"formulation {formulation}, {kv}"] = results
        if kv == BF16:
            results = cases.nan_like(q.shape, q.dtype), cases.nan_like(q.shape[:2], torch.float32)
            call = ops.BUILT["dense_attention", "aot"]
            call(*results, q, k_cache, v_cache, table, *lengths, 128**-0.5, True, *scales, 3)
            lists["dense"] = results
        (query, keys, table), lengths = case.index()
        for way in (1, 2, 3):
            chosen = torch.full((*query.shape[:2], 4), -77, dtype=torch.int32)
            ops.BUILT["select_blocks", "aot"](chosen, None, query, keys, table, *lengths.values(), 1, 0, way)
            lists[f"selection {way}, {kv}"] = (chosen,)
    return lists


@pytest.mark.parametrize("device", ["sm_90", "sm_100"])
def test_what_workspaces_held_before(emulation, device):
    """They come from an allocator. NaN, as everywhere else, is -1 to an integer, which hides much."""
    with emulation.device(device, 1):
        want = with_workspaces(device)
        for fill in (0x00, 0x01):
            emulation.fill = fill
            try:
                got = with_workspaces(device)
            finally:
                emulation.fill = 0xFF
            for name, results in want.items():
                for a, b in zip(got[name], results):
                    oracle.check_bitwise(a, b, f"{name}, {fill}")
