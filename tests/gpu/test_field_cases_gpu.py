"""The failures of test_field_cases.py on a GPU: the AOT kernels where there are any for it, and torch."""

import pytest
from field_helpers import Backend
from test_field_cases import *


@pytest.fixture(scope="module", params=["aot", "torch"])
def backend(request):
    return Backend(request.param, device="cuda")
