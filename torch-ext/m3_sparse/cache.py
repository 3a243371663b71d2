"""Writing new tokens into the paged caches."""

from typing import Optional

import torch

from . import _limits, checks
from .capability import choose
from .ops import BUILT, writing


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    index_k: Optional[torch.Tensor],
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    index_k_cache: Optional[torch.Tensor],
    slot_mapping: torch.Tensor,
    *,
    k_scale: Optional[torch.Tensor] = None,
    v_scale: Optional[torch.Tensor] = None,
) -> None:
    """Write T tokens into the caches, in place.

    Args:
        k, v: [T, Hkv, 128]. index_k: [T, 128], or None together with index_k_cache.
        k_cache, v_cache: [P, Hkv, page, 128], pages of 64 or 128 tokens. index_k_cache: [P, page, 128]. Last stride 1,
            base and strides multiples of 16 bytes. Either the dtype of what is stored, which is copied, or float8
            (e4m3fn, e5m2), for which x / scale is rounded and saturated at the largest finite value (448, 57344); NaN
            stays NaN.
        slot_mapping: [T] int64 or int32, slot = page number * page + offset in the page. A slot outside the cache, -1
            for one, is skipped. If two tokens name one slot, which of them wins is undefined.
        k_scale, v_scale: fp32 with 1 or Hkv elements, or None for 1; stored value = true value / scale. Used only where
            a float8 cache is filled from a wider dtype. Index keys have no scale.

    No gradients. Specification: `reference.store_kv`.

    Raises:
        TypeError, ValueError: an argument breaks one of the rules above. NotImplementedError: a tensor requires grad,
            or the backend cannot run it.
    """
    checks.store_kv(k, v, index_k, k_cache, v_cache, index_k_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale)
    outside = _limits.store_kv(k, k_cache, index_k, index_k_cache)
    backend = choose("store_kv", k.device, k.dtype, k_cache.dtype, outside_aot=outside)
    if backend != "torch":
        slot_mapping = slot_mapping if slot_mapping.stride(0) == 1 else slot_mapping.contiguous()
        k_scale, v_scale = _limits.packed(k_scale), _limits.packed(v_scale)
    writing(backend, (k_cache, v_cache, index_k_cache))
    BUILT["store_kv", backend](k, v, index_k, k_cache, v_cache, index_k_cache, slot_mapping, k_scale, v_scale)
