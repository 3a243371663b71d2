"""Integer, logical and floating-point instructions, moves and conversions."""

from .parser import Unsupported

WIDTHS = {"pred": "pred", "b16": 16, "u16": 16, "s16": 16, "f16": 16, "bf16": 16, "b8": 16, "u8": 16, "s8": 16}
WIDTHS |= {t: 32 for t in ("b32", "u32", "s32", "f32", "f16x2", "bf16x2")}
WIDTHS |= {t: 64 for t in ("b64", "u64", "s64", "f64", "f32x2")}
WIDER = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}
INTEGERS = ("s16", "u16", "s32", "u32", "s64", "u64")
HALVES = ("f16", "f16x2", "bf16", "bf16x2")
# Flags of floating-point handlers (float.cpp).
FLAGS = {"ftz": 1, "sat": 2, "rm": 4, "rp": 8, "rz": 16, "NaN": 32, "relu": 64}


def sources(p, args, kind):
    floating = kind in ("f32", "f64")
    return [p.source(a, WIDTHS[kind], floating) for a in args]


def plain(p, name, args, kind, imm=0):
    """A handler whose operands all have one type."""
    p.emit(name, [p.destination(args[0], WIDTHS[kind])] + sources(p, args[1:], kind), imm)


def add_or_sub(p, m, args):
    kind = m.type()
    if kind in INTEGERS:
        m.done()
        return plain(p, f"{m.opcode}.{kind}", args, kind)
    floating(p, m, args, kind)


def floating(p, m, args, kind):
    m.ignore("rn", "approx", "full")
    if kind == "f64":
        m.done()
        return plain(p, f"{m.opcode}.{kind}", args, kind)
    flags = m.flags(FLAGS)
    m.done()
    name = f"{m.opcode}.{kind}"
    if kind == "f32" and flags == 0 and m.opcode in ("add", "sub", "mul"):
        name = f"{m.opcode}.rn.f32"
    plain(p, name, args, kind, flags)


def mul(p, m, args):
    kind = m.type()
    if kind not in INTEGERS:
        return floating(p, m, args, kind)
    form = m.take("lo", "hi", "wide")
    m.done()
    if form == "wide":
        return p.emit(f"mul.wide.{kind}", [p.destination(args[0], WIDTHS[WIDER[kind]])] + sources(p, args[1:], kind))
    plain(p, f"mul.{form}.{kind}", args, kind)


def mad(p, m, args):
    kind = m.type()
    if kind not in INTEGERS:
        m.opcode = "fma"
        return floating(p, m, args, kind)
    form = m.take("lo", "hi", "wide")
    m.done()
    if form == "wide":
        wide = WIDTHS[WIDER[kind]]
        operands = [p.destination(args[0], wide)] + sources(p, args[1:3], kind) + [p.source(args[3], wide)]
        return p.emit(f"mad.wide.{kind}", operands)
    plain(p, f"mad.{form}.{kind}", args, kind)


def fma(p, m, args):
    floating(p, m, args, m.type())


def division(p, m, args):
    kind = m.type()
    if kind in INTEGERS:
        m.done()
        return plain(p, f"{m.opcode}.{kind}", args, kind)
    floating(p, m, args, kind)


def extremum(p, m, args):
    kind = m.type()
    if kind in INTEGERS:
        relu = ".relu" if m.has("relu") else ""
        m.done()
        return plain(p, f"{m.opcode}{relu}.{kind}", args, kind)
    if kind == "f64":
        m.done()
        return plain(p, f"{m.opcode}.f64", args, kind)
    flags = m.flags({"ftz": 1, "NaN": 32})
    m.done()
    plain(p, f"{m.opcode}{'3' if len(args) == 4 else ''}.{kind}", args, kind, flags)


def sign(p, m, args):
    kind = m.type()
    flags = m.flags({"ftz": 1}) if kind == "f32" else 0
    m.done()
    plain(p, f"{m.opcode}.{kind}", args, kind, flags)


def unary_float(p, m, args):
    kind = m.type()
    m.ignore("approx", "rn")
    flags = m.flags({"ftz": 1})
    m.done()
    plain(p, f"{m.opcode}.{kind}", args, kind, 0 if kind in HALVES else flags)


def copysign(p, m, args):
    kind = m.type()
    m.done()
    plain(p, f"copysign.{kind}", args, kind)


def logic(p, m, args):
    kind = m.type()
    m.done()
    if kind == "pred":
        return p.emit(f"{m.opcode}.pred", [p.destination(args[0], "pred")] + [p.pred(a) for a in args[1:]])
    plain(p, f"{m.opcode}.{kind}", args, kind)


def shift(p, m, args):
    kind = m.type()
    m.done()
    p.emit(
        f"{m.opcode}.{kind}",
        [p.destination(args[0], WIDTHS[kind]), p.source(args[1], WIDTHS[kind]), p.source(args[2], 32)],
    )


def funnel_shift(p, m, args):
    m.type()
    right, clamp = m.take("l", "r") == "r", m.take("wrap", "clamp") == "clamp"
    m.done()
    plain(p, "shf.b32", args, "b32", right | clamp << 1)


def bit_field(p, m, args):
    """bfe and bfi: position and length have 32 bits whatever the type."""
    kind = m.type()
    m.done()
    values = 1 if m.opcode == "bfe" else 2
    p.emit(f"{m.opcode}.{kind}", [p.destination(args[0], WIDTHS[kind])] + sources(p, args[1 : 1 + values], kind)
           + sources(p, args[1 + values :], "b32"))  # fmt: skip


def count_bits(p, m, args):
    kind = m.type()
    amount = m.has("shiftamt")
    m.done()
    p.emit(f"{m.opcode}.{kind}", [p.destination(args[0], 32), p.source(args[1], WIDTHS[kind])], int(amount))


def bit_reverse(p, m, args):
    kind = m.type()
    m.done()
    plain(p, f"brev.{kind}", args, kind)


def lop3(p, m, args):
    m.type()
    m.done()
    plain(p, "lop3.b32", args[:4], "b32", int(args[4], 0))


def prmt(p, m, args):
    m.type()
    m.done()  # the modes other than the default have a letter
    plain(p, "prmt.b32", args, "b32")


def selp(p, m, args):
    kind = m.type()
    m.done()
    width = WIDTHS[kind]
    p.emit(f"selp.b{width}", [p.destination(args[0], width)] + sources(p, args[1:3], kind) + [p.pred(args[3])])


UNSIGNED_COMPARISONS = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


def setp(p, m, args):
    kind = m.type()
    combine = m.take("and", "or", "xor")
    flush = m.has("ftz")
    comparison = m.rest.pop(0)
    m.done()
    unordered = kind[0] == "f" and comparison in ("equ", "neu", "ltu", "leu", "gtu", "geu")
    comparison = UNSIGNED_COMPARISONS.get(comparison, comparison[:2] if unordered else comparison)
    if kind in HALVES or kind == "pred":
        raise Unsupported(f"comparison of {kind}")
    first, _, second = args[0].partition("|")
    operands = [p.destination(first.strip(), "pred"), p.destination(second.strip() or "_", "pred")]
    operands += sources(p, args[1:3], kind)
    imm = 8 * unordered + 16 * flush
    if combine:
        imm |= {"and": 1, "or": 2, "xor": 3}[combine] | (4 if args[3].startswith("!") else 0)
        operands.append(p.pred(args[3].lstrip("!")))
    else:
        operands.append(p.constant(0, "pred"))
    p.emit(f"setp.{comparison}.{kind}", operands, imm)


def parts(token):
    return [x.strip() for x in token.strip("{} ").split(",")]


def mov(p, m, args):
    kind = m.type()
    m.done()
    to, source = args
    width = WIDTHS[kind]
    if width == "pred":
        return p.emit("mov.pred", [p.destination(to, "pred"), p.pred(source)])
    if source.startswith("{"):
        pieces = parts(source)
        piece = width // len(pieces)
        rows = [p.source(x, piece) for x in pieces]
        return p.emit(f"pack.b{width}.b{piece}", [p.destination(to, width)] + rows, len(rows))
    if to.startswith("{"):
        pieces = parts(to)
        piece = width // len(pieces)
        rows = [-1 if x == "_" else p.destination(x, piece) for x in pieces]
        return p.emit(f"unpack.b{width}.b{piece}", rows + [p.source(source, width)], len(rows))
    p.emit(f"mov.b{width}", [p.destination(to, width), p.source(source, width, kind in ("f32", "f64"))])


def cvta(p, m, args):
    """Generic addresses have windows for the spaces that aren't global; see core.h."""
    kind = m.type()
    back = m.has("to")
    space = m.take("global", "shared", "shared::cta", "shared::cluster", "local", "param", "const")
    m.done()
    window = {"shared": 0x0D << 56, "local": 0x0E << 56, "param": 0x0F << 56}.get(space.split("::")[0], 0)
    if kind != "u64":
        raise Unsupported("32-bit generic addresses")
    if space == "param" and not back:
        window = 0  # the address of a parameter is generic from the start, see Program.source
    sign = -1 if back else 1
    p.emit("add.u64", [p.destination(args[0], 64), p.source(args[1], 64), p.constant(sign * window, 64)])


ROUNDINGS = {"rni": 0, "rzi": 1, "rmi": 2, "rpi": 3}
PAIRS = ("bf16x2", "f16x2", "e4m3x2", "e5m2x2", "e2m1x2")


def cvt(p, m, args):
    source, target = m.type(), m.type()
    if target[0] in "us" and source[0] in "us":
        saturate = m.has("sat")
        m.done()
        to, from_ = p.width(args[0]), p.width(args[1]) or WIDTHS[source]
        imm = int(source[1:]) | (source[0] == "s") << 8 | int(target[1:]) << 16 | (target[0] == "s") << 24
        rows = [p.destination(args[0], to), p.source(args[1], from_)]
        return p.emit(f"cvt.int.{to}.{from_}", rows, imm | saturate << 25)
    if target in PAIRS or source in PAIRS or "f16" in (target, source) or "bf16" in (target, source):
        return convert_small(p, m, args, target, source)
    rounding = m.take(*ROUNDINGS)
    m.ignore("rn")
    flush, saturate = m.has("ftz"), m.has("sat")
    m.done()
    number = ROUNDINGS[rounding] if rounding else 0
    if target == source == "f32":
        return plain(p, "cvt.f32.f32", args, "f32", number | flush << 4 | (rounding is None) << 5 | saturate << 6)
    if source[0] == "f" and target[0] in "us" and rounding is None or saturate and target != "f32":
        raise Unsupported("conversion")
    if target[1:] == "8" or source[1:] == "8":
        raise Unsupported("conversion between a float and 8 bits")
    rows = [p.destination(args[0], WIDTHS[target]), p.source(args[1], WIDTHS[source], source[0] == "f")]
    p.emit(f"cvt.{target}.{source}", rows, number | flush << 4)


def convert_small(p, m, args, target, source):
    if not m.has("rn") and target in ("f16", "bf16", "f16x2", "bf16x2") and source == "f32":
        zero = m.has("rz")
        if not zero:
            raise Unsupported("rounding")
    else:
        zero = False
    imm = m.has("relu") | m.has("satfinite") << 1 | zero << 2
    m.done()
    to = 32 if target in ("f16x2", "bf16x2", "f32") else 16
    rows = [p.destination(args[0], to)]
    if source == "f32":
        rows += [p.source(a, 32, True) for a in args[1:]]
    else:
        rows.append(p.source(args[1], 32 if source in ("f16x2", "bf16x2") else 16))
    if target == source:
        raise Unsupported("conversion")
    p.emit(f"cvt.{target}.{source}", rows, imm)


# ---- exchange within a warp ----


def shfl(p, m, args):
    m.type()
    m.ignore("sync")
    mode = m.take("up", "down", "bfly", "idx")
    m.done()
    first, _, inside = args[0].partition("|")
    operands = [p.destination(first.strip(), 32), p.destination(inside.strip(), "pred") if inside else -1]
    p.emit("shfl", operands + sources(p, args[1:], "b32"), ("up", "down", "bfly", "idx").index(mode))


def vote(p, m, args):
    m.type()
    m.ignore("sync")
    mode = m.take("all", "any", "uni", "ballot")
    m.done()
    row = p.destination(args[0], 32 if mode == "ballot" else "pred")
    imm = ("all", "any", "uni", "ballot").index(mode) | 4 * args[1].startswith("!")
    p.emit("vote", [row, p.pred(args[1].lstrip("!")), p.source(args[2], 32)], imm)


def match(p, m, args):
    kind = m.type()
    m.ignore("sync")
    everyone = m.take("any", "all") == "all"
    m.done()
    first, _, pred = args[0].partition("|")
    operands = [p.destination(first.strip(), 32), p.destination(pred.strip(), "pred") if pred else -1]
    p.emit(f"match.{kind}", operands + [p.source(args[1], WIDTHS[kind]), p.source(args[2], 32)], int(everyone))


def redux(p, m, args):
    kind = m.type()
    m.ignore("sync")
    if kind == "f32":
        flags = m.flags({"max": 1, "abs": 2, "NaN": 4})
        m.take("min")
        m.done()
        return plain(p, "redux.f32", args, "f32", flags)
    operation = m.take("add", "min", "max", "and", "or", "xor")
    m.done()
    plain(p, f"redux.{operation}.{kind}", args, kind)


def activemask(p, m, args):
    m.type()
    m.done()
    p.emit("activemask", [p.destination(args[0], 32)])


def elect(p, m, args):
    m.ignore("sync")
    m.done()
    lane, _, pred = args[0].partition("|")
    row = -1 if lane.strip() == "_" else p.destination(lane.strip(), 32)
    p.emit("elect", [row, p.destination(pred.strip(), "pred"), p.source(args[1], 32)])


ENCODERS = {
    "add": add_or_sub, "sub": add_or_sub, "mul": mul, "mad": mad, "fma": fma, "div": division, "rem": division,
    "min": extremum, "max": extremum, "neg": sign, "abs": sign, "copysign": copysign,
    "and": logic, "or": logic, "xor": logic, "not": logic, "shl": shift, "shr": shift, "shf": funnel_shift,
    "bfe": bit_field, "bfi": bit_field, "popc": count_bits, "clz": count_bits, "bfind": count_bits, "brev": bit_reverse,
    "lop3": lop3, "prmt": prmt, "selp": selp, "setp": setp, "mov": mov, "cvta": cvta, "cvt": cvt,
    "rcp": unary_float, "rsqrt": unary_float, "sqrt": unary_float, "ex2": unary_float, "lg2": unary_float,
    "sin": unary_float, "cos": unary_float, "tanh": unary_float,
    "shfl": shfl, "vote": vote, "match": match, "redux": redux, "activemask": activemask, "elect": elect,
    "nanosleep": lambda p, m, args: p.emit("sleep"), "trap": lambda p, m, args: p.emit("trap"),
}  # fmt: skip
