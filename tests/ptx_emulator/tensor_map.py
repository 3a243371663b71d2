"""Tensor maps for programs that are launched without the extension."""

import struct

# In the order of CUtensorMapDataType and CUtensorMapSwizzle.
TYPES = ("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f64", "bf16")
TORCH_TYPES = {
    "uint8": "u8", "int8": "u8", "float8_e4m3fn": "u8", "float8_e5m2": "u8", "bfloat16": "bf16", "float16": "f16",
    "float32": "f32", "int32": "s32", "int64": "s64",
}  # fmt: skip
SWIZZLES = (0, 32, 64, 128)


def pack(kind, base, extents, strides, box, swizzle=0):
    """The 128 bytes that the recording driver's encode call leaves (core/tensor_map.h). Dimensions innermost first;
    `strides` in bytes, of all but the innermost.
    """
    if any(s % 16 or not 0 < s < 1 << 40 for s in strides) or any(not 1 <= b <= 256 for b in box):
        raise ValueError(f"strides {strides} and box {box}: expected multiples of 16 below 2^40, and 1 to 256")

    def padded(values, count):
        return list(values) + [0] * (count - len(values))

    numbers = [*padded(extents, 5), *padded(box, 5), TYPES.index(kind), len(extents), SWIZZLES.index(swizzle), 0]
    return struct.pack("<6Q14I", base, 0, *padded(strides, 4), *numbers).ljust(128, b"\0")


def encode(tensor, box, swizzle=0, dims=None):
    """The map of a torch tensor; `dims` orders its dimensions innermost first (default: from the last one on)."""
    dims = list(dims) if dims is not None else list(range(tensor.dim()))[::-1]
    if tensor.stride(dims[0]) != 1:
        raise ValueError("the innermost dimension must be contiguous")
    size = tensor.element_size()
    kind = TORCH_TYPES[str(tensor.dtype).removeprefix("torch.")]
    strides = [tensor.stride(d) * size for d in dims[1:]]
    return pack(kind, tensor.data_ptr(), [tensor.shape[d] for d in dims], strides, list(box), swizzle)
