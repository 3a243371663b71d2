"""Tensor maps for programs that are launched without the extension."""

import struct

MAGIC = 0x70614D54
TYPES = {"u8": 0, "u16": 1, "u32": 2, "s32": 3, "u64": 4, "s64": 5, "f16": 6, "f32": 7, "f64": 8, "bf16": 9}
TORCH_TYPES = {"uint8": "u8", "int8": "u8", "float8_e4m3fn": "u8", "float8_e5m2": "u8", "bfloat16": "bf16",
               "float16": "f16", "float32": "f32", "int32": "s32", "int64": "s64"}  # fmt: skip
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}


def pack(kind, base, extents, strides, box, swizzle=0):
    """The 128 bytes that the emulated cuTensorMapEncodeTiled writes (core/tensor_map.h). Dimensions innermost first;
    `strides` in bytes, of all but the innermost.
    """
    rank = len(extents)
    pad = lambda x, n: list(x) + [0] * (n - len(x))  # noqa: E731
    head = struct.pack("<I4BQ", MAGIC, TYPES[kind], rank, 0, SWIZZLES[swizzle], base)
    body = struct.pack("<4Q5I5H", *pad(strides, 4), *pad([n - 1 for n in extents], 5), *pad(box, 5))
    return (head + body + bytes([1] * 5) + bytes(1)).ljust(128, b"\0")


def encode(tensor, box, swizzle=0, dims=None):
    """The map of a torch tensor; `dims` orders its dimensions innermost first (default: from the last one on)."""
    dims = list(dims) if dims is not None else list(range(tensor.dim()))[::-1]
    if tensor.stride(dims[0]) != 1:
        raise ValueError("the innermost dimension must be contiguous")
    size = tensor.element_size()
    kind = TORCH_TYPES[str(tensor.dtype).removeprefix("torch.")]
    strides = [tensor.stride(d) * size for d in dims[1:]]
    return pack(kind, tensor.data_ptr(), [tensor.shape[d] for d in dims], strides, list(box), swizzle)
