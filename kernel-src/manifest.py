"""The launch contract of one compiled kernel: entry name, parameter list, block, shared memory, registers.

The parameter list is read from three sources that must agree: the PTX `.param` declarations (size, alignment), the
cubin's KPARAM_INFO records (offset, size: what the driver uses) and the MLIR kernel signature (types). ptxas aligns
*absolute* constant-bank addresses, so a cubin offset can differ from the PTX one (a leading tensor map on sm_90 starts
at 48); launches therefore pass an array of pointers and never a packed buffer.
"""

import re
import struct

PTX_BYTES = {"8": 1, "16": 2, "32": 4, "64": 8}
# Records of .nv.info (EIFMT_SVAL carries a byte string).
SVAL, KPARAM_INFO, PARAM_CBANK, REGCOUNT, MIN_STACK_SIZE = 4, 0x17, 0x0A, 0x2F, 0x12
MAX_PARAM_BYTES = 4096


class ContractError(Exception):
    """Two descriptions of the same kernel differ, or one is not of a form this project uses."""


def describe(ptx, cubin, mlir, dynamic_smem):
    """The manifest of a one-kernel program as a JSON-ready dict."""
    entry, params, directives = _ptx_signature(ptx)
    image = _cubin_facts(cubin)
    if image["entry"] != entry:
        raise ContractError(f"entry: PTX has {entry}, cubin {image['entry']}")
    if [p["size"] for p in params] != [size for _, size in image["params"]]:
        raise ContractError(f"{entry}: parameter sizes differ between PTX and cubin")
    types = _mlir_types(mlir, entry)
    if len(types) != len(params):
        raise ContractError(f"{entry}: {len(types)} parameters in MLIR, {len(params)} in PTX")
    end = 0
    for param, (offset, size), mlir_type in zip(params, image["params"], types):
        base = image["param_base"]
        expected = -(-(base + end) // param["align"]) * param["align"] - base
        if offset != expected:
            raise ContractError(f"{entry}: parameter at offset {offset}, the alignment rule says {expected}")
        end = offset + size
        param["offset"], param["kind"] = offset, _kind(mlir_type, size)
    if end > MAX_PARAM_BYTES:
        raise ContractError(f"{entry}: {end} bytes of parameters")
    return {
        "entry": entry,
        "arch": directives["target"],
        "block": directives["reqntid"],
        "dynamic_smem": dynamic_smem,
        "static_smem": image["static_smem"],
        "registers": image["registers"],
        "stack_bytes": image["stack_bytes"],
        "params": params,
        "ptx_version": directives["version"],
        "compiler": directives["compiler"],
        "cubin_bytes": len(cubin),
    }


def _ptx_signature(text):
    found = re.findall(r"\.visible \.entry (\w+)\((.*?)\n\)(.*?)\{", text, re.S)
    if len(found) != 1:
        raise ContractError(f"PTX has {len(found)} entries, expected 1")
    entry, body, directives = found[0]
    params = []
    for line in body.strip().splitlines():
        line = line.strip().rstrip(",")
        match = re.fullmatch(r"\.param (?:\.align (\d+) )?\.[busf](\d+)(?: \.ptr[^,]*?)? \w+?(?:\[(\d+)\])?", line)
        if not match:
            raise ContractError(f"{entry}: unknown PTX parameter declaration {line!r}")
        align, bits, count = match.groups()
        size = PTX_BYTES[bits] * int(count or 1)
        params.append({"size": size, "align": int(align or size)})
    block = re.search(r"\.reqntid (\d+), (\d+), (\d+)", directives)
    if not block:
        raise ContractError(f"{entry}: no .reqntid, so the block size is not part of the program")
    return (
        entry,
        params,
        {
            "reqntid": [int(n) for n in block.groups()],
            "target": re.search(r"\.target (\S+)", text)[1],
            "version": re.search(r"\.version (\S+)", text)[1],
            "compiler": re.search(r"release (\S+),", text)[1],
        },
    )


def _mlir_types(text, entry):
    start = text.index(f"cuda.kernel @{entry}(") + len(f"cuda.kernel @{entry}")
    depth, in_string, argument, arguments = 0, False, "", []
    for char in text[start:]:
        in_string ^= char == '"'
        if not in_string:
            depth += (char in "<({[") - (char in ">)}]")
            if depth == 0:
                break
            if depth == 1 and char in "(,":
                arguments.append(argument)
                argument = ""
                continue
        argument += char
    arguments = [a for a in (*arguments[1:], argument) if a.strip()]
    return [a.split(": ", 1)[1] for a in arguments]


def _kind(mlir_type, size):
    """Parameter kinds of this project's kernels; anything else is a fault of the kernel's signature."""
    if "tiled_tma_" in mlir_type and size == 128:
        return "tensor_map"
    if mlir_type.startswith("!cute.ptr"):
        return "pointer"
    if mlir_type in ("i64", "i32", "f32"):
        return mlir_type
    raise ContractError(f"parameter of type {mlir_type}: use tensor maps, pointers, Int32, Int64 and Float32 only")


def _cubin_facts(data):
    sections = _elf_sections(data)
    texts = [name[6:] for name in sections if name.startswith(".text.")]
    if len(texts) != 1:
        raise ContractError(f"cubin holds {len(texts)} kernels, expected 1")
    entry = texts[0]
    params, base, registers, stack = {}, None, None, None
    for kind, value in _info_records(data, sections[".nv.info." + entry]):
        if kind == KPARAM_INFO:
            _, ordinal, offset, flags = struct.unpack("<IHHI", value)
            params[ordinal] = (offset, flags >> 18)
        elif kind == PARAM_CBANK:
            base = struct.unpack_from("<H", value, 4)[0]
    for kind, value in _info_records(data, sections[".nv.info"]):
        if kind == REGCOUNT:
            registers = struct.unpack("<II", value)[1]
        elif kind == MIN_STACK_SIZE:
            stack = struct.unpack("<II", value)[1]
    shared = sections.get(".nv.shared." + entry)
    return {
        "entry": entry,
        "params": [params[i] for i in range(len(params))],
        "param_base": base,
        "registers": registers,
        "stack_bytes": stack,
        "static_smem": shared[1] if shared else 0,
    }


def _elf_sections(data):
    """name -> (offset, size)"""
    table = struct.unpack_from("<Q", data, 40)[0]
    count, names_index = struct.unpack_from("<HH", data, 60)
    headers = [struct.unpack_from("<IIQQQQ", data, table + 64 * i) for i in range(count)]
    names = headers[names_index][4]
    result = {}
    for name, _, _, _, offset, size in headers:
        start = names + name
        result[data[start : data.index(b"\0", start)].decode()] = (offset, size)
    return result


def _info_records(data, section):
    offset, size = section
    end = offset + size
    while offset < end:
        form, kind, value = struct.unpack_from("<BBH", data, offset)
        offset += 4
        if form == SVAL:
            yield kind, data[offset : offset + value]
            offset += value
