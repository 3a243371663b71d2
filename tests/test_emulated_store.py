"""The store programs in the PTX emulator, through the public function and the launcher, byte for byte.

Needs `--backend=emulated`.
"""

import oracle
import pytest
import torch

import m3_sparse

BF16, FP16, FP32, E4M3, E5M2 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2
# (k and v, KV cache, index k, index cache)
DTYPES = [
    (BF16, BF16, BF16, BF16), (FP32, FP32, FP32, FP32), (BF16, E4M3, BF16, E4M3), (BF16, E4M3, BF16, BF16),
    (BF16, BF16, BF16, E4M3), (BF16, E5M2, BF16, E5M2), (FP16, E4M3, FP16, E4M3), (FP16, E5M2, FP16, E5M2),
    (FP32, E4M3, FP32, E4M3), (FP32, E5M2, FP32, E5M2), (E4M3, E4M3, BF16, BF16), (BF16, E5M2, BF16, BF16),
    (FP16, E4M3, FP16, FP16), (FP16, E5M2, FP16, FP16), (FP32, E4M3, FP32, FP32), (FP32, E5M2, FP32, FP32),
]  # fmt: skip


def problem(dtypes, tokens=37, heads=2, page=64, slot_type=torch.int64):
    generator = torch.Generator().manual_seed(tokens)
    kv, kept, index, index_kept = dtypes

    def filled(*shape, dtype):
        return torch.full((*shape[:-1], shape[-1] * dtype.itemsize), 0xA5, dtype=torch.uint8).view(dtype)

    def drawn(*shape, dtype):
        return (torch.randn(shape, generator=generator) * 40).to(dtype)

    k, v = (drawn(tokens, heads, 128, dtype=kv) for _ in range(2))
    k_cache, v_cache = (filled(3, heads, page, 128, dtype=kept) for _ in range(2))
    slots = torch.randperm(3 * page, generator=generator)[:tokens].to(slot_type)
    unused = int(slots[0])
    slots[::5] = -1
    if tokens > 4:
        slots[1], slots[2], slots[3] = 3 * page, 2**30, -(2**31)
        if slot_type == torch.int64:
            slots[4] = 2**32 + unused  # none, though its lower half is one
    return [k, v, drawn(tokens, 128, dtype=index), k_cache, v_cache, filled(3, page, 128, dtype=index_kept), slots]


def check(arguments, **scales):
    want = oracle.store_kv(*arguments, **scales)
    with m3_sparse.backend("aot"):
        m3_sparse.store_kv(*arguments, **scales)
    for got, expected in zip(arguments[3:6], want):
        if got is not None:
            assert torch.equal(oracle.stored_bytes(got), expected)


@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: "-".join(str(x)[6:] for x in d))
@pytest.mark.parametrize("heads, page, slot_type", [(2, 64, torch.int64), (5, 128, torch.int32), (1, 64, torch.int64)])
def test_every_byte(emulation, dtypes, heads, page, slot_type):
    with emulation.policy("random1+race"):
        for tokens in (1, 37):
            check(problem(dtypes, tokens, heads, page, slot_type))
    scales = {"k_scale": torch.rand(heads) + 0.1, "v_scale": torch.rand(1) + 0.1}
    with emulation.policy("eager+race"):
        check(problem(dtypes, 9, heads, page, slot_type), **scales)


def test_every_finite_bfloat16_into_e4m3(emulation):
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(BF16).view(512, 1, 128)
    finite = torch.where(bits.isfinite(), bits, torch.zeros_like(bits))
    caches = [torch.zeros(4, 1, 128, 128).to(E4M3) for _ in range(2)]
    check([finite, finite.flip(0), None, *caches, None, torch.arange(512)])


def test_every_block_was_executed(emulation):
    """The last test of this file."""
    emulation.check_coverage("store")
