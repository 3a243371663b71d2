"""mma.sync, wgmma and tcgen05."""

import re

from .encode_arithmetic import parts
from .parser import Unsupported

# The order is that of Element in small_float.h.
ELEMENTS = ("f16", "bf16", "e4m3", "e5m2", "tf32")
ELEMENT_BYTES = {"f16": 2, "bf16": 2, "e4m3": 1, "e5m2": 1, "tf32": 4}


def mma(p, m, args):
    m.ignore("sync", "aligned", "kind::f8f6f4")
    shape = next(r for r in m.rest if r.startswith("m16n8k"))
    m.take(shape), m.take("row"), m.take("col")
    types, m.rest = m.rest, []
    if len(types) != 4 or types[0] != "f32" or types[3] != "f32" or set(types[1:3]) - set(ELEMENTS):
        raise Unsupported("types")
    a, b = types[1], types[2]
    row_bytes = int(shape[6:]) * ELEMENT_BYTES[a]
    if row_bytes not in (16, 32) or ELEMENT_BYTES[a] != ELEMENT_BYTES[b]:
        raise Unsupported("shape")
    rows = [p.destination(x, 32) for x in parts(args[0])]
    rows += [p.source(x, 32, True) for token in args[1:] for x in parts(token)]
    if len(rows) != 8 + 3 * row_bytes // 16:
        raise Unsupported("number of registers")
    p.emit("mma", rows, ELEMENTS.index(a) | ELEMENTS.index(b) << 8 | row_bytes << 16)


def wgmma(p, m, args):
    what = m.rest.pop(0)
    if what == "fence":
        return p.emit("nothing")
    if what == "commit_group":
        return p.emit("wgmma.commit")
    if what == "wait_group":
        return p.emit("wgmma.wait", [], int(args[0]))
    m.ignore("sync", "aligned")
    shape = re.fullmatch(r"m64n(\d+)k(\d+)", m.rest.pop(0))
    n, k = int(shape[1]), int(shape[2])
    types, m.rest = m.rest, []
    if what != "mma_async" or len(types) != 3 or types[0] != "f32" or set(types[1:]) - set(ELEMENTS):
        raise Unsupported("types")
    a, b = types[1:]
    if k * ELEMENT_BYTES[a] != 32:
        raise Unsupported("shape")
    in_registers = args[1].startswith("{")
    rows = [p.pred(args[3])]
    rows += [p.source(x, 32) for x in parts(args[1])] if in_registers else [p.source(args[1], 64)]
    rows.append(p.source(args[2], 64))
    accumulator = [p.destination(x, 32) for x in parts(args[0])]
    if len(accumulator) != n // 2:
        raise Unsupported("number of registers")
    numbers = [int(x) for x in args[4:]]
    negated = [x < 0 for x in numbers[:2]]
    transposed = numbers[2:]  # only for 16-bit types; one number where A is in registers
    a_mn = transposed[0] if len(transposed) == 2 else 0
    b_mn = transposed[-1] if transposed else 0
    flags = in_registers | a_mn << 1 | b_mn << 2 | negated[0] << 3 | negated[1] << 4
    imm = n | k << 16 | ELEMENTS.index(a) << 24 | ELEMENTS.index(b) << 28 | flags << 32
    p.emit("wgmma", rows + accumulator, imm)


ENCODERS = {"mma": mma, "wgmma": wgmma}
