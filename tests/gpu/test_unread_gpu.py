"""What isn't read can't matter, on a GPU: test_unread.py for the AOT kernels where there are any for it, and torch."""

import pytest
from field_helpers import Backend
from test_unread import *


@pytest.fixture(scope="module", params=["aot", "torch"])
def backend(request):
    return Backend(request.param, device="cuda")
