"""m3-sparse: block-sparse attention for MiniMax-M3 over paged KV caches.

`select_blocks` chooses 128-token blocks per query row, `sparse_attention` attends to them; `explain` tells what runs
where. Importing this package creates no CUDA context, prints nothing and imports nothing but torch.
"""

from . import (
    _extension,  # noqa: F401  loads the compiled extension, before anything asks for an operator
    layers,
)
from .attention import dense_attention, merge_states, sparse_attention
from .cache import store_kv
from .capability import backend, capabilities, explain
from .selection import block_scores, select_blocks
from .transformers import flash_attn_forward, register_if_loaded, register_transformers, supports_flash_attn

__all__ = [
    "backend",
    "block_scores",
    "capabilities",
    "dense_attention",
    "explain",
    "flash_attn_forward",
    "layers",
    "merge_states",
    "register_transformers",
    "select_blocks",
    "sparse_attention",
    "store_kv",
    "supports_flash_attn",
]

register_if_loaded()
