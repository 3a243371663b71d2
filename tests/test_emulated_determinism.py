"""The README's table of what changes a result's bits, for the AOT kernels in the PTX emulator. Needs
`--backend=emulated`."""

import determinism_checks as checks
import pytest

# Where the table promises no bits, and this problem shows why.
SEEN = {("sparse/kv_stationary", "selection"), ("dense/default", "cut")}


@pytest.mark.parametrize("way, change", checks.cells("aot"), ids=lambda x: x.replace(" ", "_"))
def test_aot(emulation, way, change):
    differs = checks.check(way, change, "small", lambda function: function(), "emulated", wrap=emulation.wrapped)
    print(f"{way}, {change}: {'other' if differs else 'same'} bits")
    assert differs or (way, change) not in SEEN
