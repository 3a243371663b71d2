"""What isn't read can't matter, for the AOT kernels in the PTX emulator: test_unread.py. Needs `--backend=emulated`."""

import pytest
import test_unread
from field_helpers import Backend
from test_unread import *


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
