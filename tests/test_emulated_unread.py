"""What isn't read can't matter, for the AOT kernels in the PTX emulator: test_unread.py. Needs `--backend=emulated`."""

import pytest
from field_helpers import Backend
from test_unread import *


@pytest.fixture(scope="module")
def backend(emulation):
    return Backend("aot")
