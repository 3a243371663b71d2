"""Loads, stores, atomics, matrix loads and stores, addresses."""

from .encode_arithmetic import WIDTHS, parts
from .parser import SIZES, Unsupported

# The order is that of Space in memory.h.
SPACES = ("global", "shared", "shared::cluster", "local", "param", "generic")
# Orderings and scopes: every access of this machine is atomic and visible at once.
ORDERINGS = (
    "weak", "volatile", "relaxed", "acquire", "release", "acq_rel", "cta", "cluster", "gpu", "sys", "nc", "mmio", "ca",
    "cg", "cs", "lu", "cv", "wb", "wt",
)  # fmt: skip
REGISTER_CODES = {16: 0, 32: 1, 64: 2}


def space_of(m):
    name = m.take("global", "shared", "shared::cta", "shared::cluster", "local", "param", "const", "param::entry")
    name = {"shared::cta": "shared", "param::entry": "param", "const": "global", None: "generic"}.get(name, name)
    return SPACES.index(name)


def access(m):
    """(space, number of elements, type); only modifiers of the particular opcode remain."""
    kind = m.type()
    space = space_of(m)
    count = int((m.take("v2", "v4", "v8") or "v1")[1:])
    hint = m.has("L2::cache_hint")
    m.ignore(*ORDERINGS)
    return space, count, kind, hint


def registers(p, token, kind, destination):
    """Rows of a register or vector, and the code of their width."""
    names = parts(token)
    widths = {p.width(n) for n in names if p.width(n)} or {WIDTHS[kind]}
    if len(widths) != 1:
        raise Unsupported("registers of different widths")
    [width] = widths
    if destination:
        rows = [-1 if n == "_" else p.destination(n, width) for n in names]
    else:
        rows = [p.source(n, width, kind[0] == "f") for n in names]
    return rows, width


def ld(p, m, args):
    space, count, kind, _ = access(m)
    m.done()
    rows, width = registers(p, args[0], kind, True)
    size = SIZES[kind[1:]]
    imm = space | REGISTER_CODES[width] << 4 | (kind[0] == "s") << 6
    p.emit(f"ld.{8 * size}.{count}", p.address(args[1]) + rows, imm)


def st(p, m, args):
    if m.has("async"):
        return st_async(p, m, args)
    space, count, kind, _ = access(m)
    m.done()
    rows, width = registers(p, args[1], kind, False)
    p.emit(f"st.{kind[1:]}.{count}", p.address(args[0]) + rows, space | REGISTER_CODES[width] << 4)


def st_async(p, m, args):
    space, count, kind, _ = access(m)
    m.ignore("mbarrier::complete_tx::bytes")
    m.done()
    if SPACES[space] != "shared::cluster":
        raise Unsupported("st.async outside shared::cluster")
    rows, _ = registers(p, args[1], kind, False)
    p.emit(f"st.async.{kind[1:]}.{count}", p.address(args[0]) + p.address(args[2]) + rows)


ATOMICS = ("add", "min", "max", "and", "or", "xor", "exch", "inc", "dec", "cas")


def atom(p, m, args):
    """atom and red."""
    kind = m.type()
    space = space_of(m)
    operation = m.take(*ATOMICS)
    vector = m.take("v2", "v4", "v8")
    m.ignore("noftz", *ORDERINGS)
    m.done()
    result = m.opcode == "atom"
    address = p.address(args[1 if result else 0])
    values = args[2 if result else 1 :]
    if vector:
        if kind != "f32" or operation != "add" or result:
            raise Unsupported("vector atomic")
        rows, _ = registers(p, values[0], kind, False)
        return p.emit(f"red.add.f32.{vector[1:]}", address + rows, space)
    to = p.destination(args[0], WIDTHS[kind]) if result and args[0] != "_" else -1
    rows = [p.source(v, WIDTHS[kind], kind[0] == "f") for v in values[: 2 if operation == "cas" else 1]]
    if kind in ("f16x2", "bf16x2") and operation == "add":
        return p.emit("atom.add.x2", address + rows + [to], space | (kind == "bf16x2") << 4)
    if kind[0] == "b" and kind in ("b32", "b64"):
        kind = "u" + kind[1:]
    p.emit(f"atom.{operation}.{kind}", address + rows + [to], space)


def matrix(p, m, args):
    """ldmatrix and stmatrix of 8x8 matrices of 16-bit elements."""
    kind = m.type()
    space = space_of(m)
    m.ignore("sync", "aligned")
    shape, count, transposed = m.take("m8n8"), m.take("x1", "x2", "x4"), m.has("trans")
    m.done()
    if kind != "b16" or shape != "m8n8" or SPACES[space] not in ("shared", "generic"):
        raise Unsupported("matrix shape")
    if SPACES[space] == "generic":
        raise Unsupported("generic matrix address")
    where, names = (args[1], args[0]) if m.opcode == "ldmatrix" else (args[0], args[1])
    rows, _ = registers(p, names, "b32", m.opcode == "ldmatrix")
    p.emit(m.opcode, p.address(where) + rows, int(count[1:]) | transposed << 8)


def mapa(p, m, args):
    kind = m.type()
    space = m.take("shared::cluster", "shared")
    m.done()
    width = WIDTHS[kind]
    imm = 0
    if space is None:
        imm = 64
    elif width != 32:
        raise Unsupported("64-bit shared address")
    p.emit("mapa", [p.destination(args[0], width), p.source(args[1], width), p.source(args[2], 32)], imm)


def getctarank(p, m, args):
    m.type()
    if not m.has("shared::cluster"):
        raise Unsupported("generic address")
    m.done()
    p.emit("getctarank", [p.destination(args[0], 32), p.source(args[1], 32)])


def isspacep(p, m, args):
    space = m.take("global", "shared", "shared::cluster", "shared::cta", "local", "param")
    m.done()
    window = {"shared": 0x0D, "local": 0x0E, "param": 0x0F}.get(space.split("::")[0], 0)
    p.emit("isspacep", [p.destination(args[0], "pred"), p.source(args[1], 64)], window)


def hint(p, m, args):
    p.emit("prefetch")


ENCODERS = {
    "ld": ld, "ldu": ld, "st": st, "atom": atom, "red": atom, "ldmatrix": matrix, "stmatrix": matrix, "mapa": mapa,
    "getctarank": getctarank, "isspacep": isspacep, "prefetch": hint, "prefetchu": hint, "discard": hint,
    "applypriority": hint, "createpolicy": lambda p, m, args: p.destination(args[0], 64),
}  # fmt: skip
