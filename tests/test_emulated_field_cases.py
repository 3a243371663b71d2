"""The failures of test_field_cases.py on the AOT kernels, in the PTX emulator. Needs `--backend=emulated`."""

import pytest
from field_helpers import Backend
from test_field_cases import *


@pytest.fixture(scope="module")
def backend(emulation):
    return Backend("aot")
