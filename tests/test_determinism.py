"""The README's table of what changes a result's bits, for the torch backend on the CPU; and the table itself.

The same cells: the AOT kernels in test_emulated_determinism.py, both on a GPU, in graphs too, in
gpu/test_determinism_gpu.py.
"""

import determinism_checks as checks
import pytest
from determinism_table import CELLS, CHANGES, WAYS


@pytest.mark.parametrize("way, change", checks.cells("torch"), ids=lambda x: x.replace(" ", "_"))
def test_torch(way, change):
    differs = checks.check(way, change, "small", lambda function: function(), "torch")
    print(f"{way}, {change}: {'other' if differs else 'same'} bits")


def test_the_table_is_complete():
    assert set(CELLS) == {(way, change) for way in WAYS for change in CHANGES}
    assert all(len(row) == len(CHANGES) for _, row in WAYS.values())
