"""mma.sync, wgmma and tcgen05."""

import re

from .encode_arithmetic import parts
from .parser import Unsupported

# The order is that of Element in small_float.h.
ELEMENTS = ("f16", "bf16", "e4m3", "e5m2", "tf32")
# Shapes of tcgen05.ld and st, in the order of Shape in tensor_memory.cpp: registers of a thread in .x1.
SHAPES = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}
CP_SHAPES = {
    (128, 256, None),
    (128, 128, None),
    (64, 128, "warpx2::01_23"),
    (64, 128, "warpx2::02_13"),
    (32, 128, "warpx4"),
}
CP_COPIES = {None: 0, "warpx2::01_23": 1, "warpx4": 2, "warpx2::02_13": 3}  # tensor_memory.cpp
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


def tcgen05(p, m, args):
    what = m.rest.pop(0)
    m.ignore("sync", "aligned")
    if "cta_group::2" in m.rest:
        raise Unsupported("pairs of CTAs")
    m.take("cta_group::1")
    if what == "alloc":
        m.take("shared::cta"), m.take("b32")
        m.done()
        return p.emit("tcgen05.alloc", p.address(args[0]) + [p.source(args[1], 32)])
    if what == "dealloc":
        m.take("b32")
        m.done()
        return p.emit("tcgen05.dealloc", [p.source(args[0], 32), p.source(args[1], 32)])
    if what == "relinquish_alloc_permit":
        m.done()
        return p.emit("tcgen05.relinquish")
    if what in ("wait::st", "wait::ld"):
        m.done()
        return p.emit(f"tcgen05.{what}")
    if what.startswith("fence::"):
        return p.emit("nothing")  # orders tcgen05 operations across threads; here they are seen in order of issue
    if what == "commit":
        multicast = m.has("multicast::cluster")
        m.take("mbarrier::arrive::one"), m.take("shared::cluster"), m.take("b64")
        m.done()
        return p.emit("tcgen05.commit", p.address(args[0]) + [p.source(args[1], 16) if multicast else -1])
    if what in ("ld", "st"):
        return tensor_memory(p, m, args, what)
    if what == "cp":
        return tensor_copy(p, m, args)
    if what == "mma":
        return tcgen05_mma(p, m, args)
    raise Unsupported("tcgen05 operation")


def tensor_memory(p, m, args, what):
    """tcgen05.ld, ld.red and st."""
    kind = m.type()
    reduced = m.has("red")
    shape = m.take(*SHAPES)
    repeats = next(r for r in m.rest if re.fullmatch(r"x\d+", r))
    m.take(repeats)
    halves = m.has("pack::16b" if what == "ld" else "unpack::16b")
    flags = m.flags({"max": 1, "abs": 2, "NaN": 4}) if reduced else 0
    if reduced:
        m.take("min")
    m.done()
    if kind not in ("b32", "f32"):
        raise Unsupported("type")
    args = list(args)
    split = int(args.pop(-1 if what == "ld" else 1), 0) if shape == "16x32bx2" else 0
    where, names = (args[-1], args[0]) if what == "ld" else (args[0], args[1])
    rows = [p.destination(x, 32) if what == "ld" else p.source(x, 32) for x in parts(names)]
    count = int(repeats[1:]) * SHAPES[shape]
    if len(rows) != count:
        raise Unsupported("number of registers")
    imm = count | list(SHAPES).index(shape) << 16 | halves << 20 | flags << 24 | split << 32
    if not reduced:
        return p.emit(f"tcgen05.{what}", p.address(where) + rows, imm)
    if shape != "32x32b" or halves:
        raise Unsupported("shape")
    p.emit("tcgen05.ld.red", p.address(where) + [p.destination(args[1], 32)] + rows, imm)


def tensor_copy(p, m, args):
    """tcgen05.cp without decompression. 4x256b, which renews four lanes, isn't implemented: no source says which."""
    shape = m.rest.pop(0)
    copies = m.take("warpx4", "warpx2::01_23", "warpx2::02_13")
    m.done()
    rows, bits = map(int, shape[:-1].split("x"))
    if (rows, bits, copies) not in CP_SHAPES:
        raise Unsupported("shape")
    p.emit("tcgen05.cp", p.address(args[0]) + [p.source(args[1], 64)], rows | bits // 8 << 16 | CP_COPIES[copies] << 24)


def tcgen05_mma(p, m, args):
    kind = m.take("kind::f16", "kind::f8f6f4")
    m.done()
    if kind is None or len(args) != 5:
        raise Unsupported("kind or number of operands")
    in_tmem = args[1].startswith("[")
    a = p.address(args[1]) if in_tmem else [p.source(args[1], 64), 0, 0]
    rows = p.address(args[0]) + a + [p.source(args[2], 64), p.source(args[3], 32), p.pred(args[4])]
    p.emit("tcgen05.mma", rows, (kind == "kind::f16") | in_tmem << 1)


ENCODERS = {"mma": mma, "wgmma": wgmma, "tcgen05": tcgen05}
