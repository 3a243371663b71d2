"""Autocast must not reach what a call computes: it would round the operands of products to 16 bits, by a setting that is
none of the call's arguments, and on one backend only.
"""

import contextlib
from typing import Any

import torch


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A context in which torch takes the dtypes as they are."""
    kind = device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return contextlib.nullcontext()
    return torch.autocast(kind, enabled=False)
