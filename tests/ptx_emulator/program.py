"""A parsed entry to a program of the core: control flow, the register file's layout, and the encoding of operands."""

import re
import struct

import numpy as np

from . import core, encode_arithmetic, encode_barriers, encode_copies, encode_memory, encode_tensor
from .parser import Instruction, Unsupported

RESERVED_SHARED = 1024
PARAM_WINDOW = 0x0F00000000000000
EXIT = -1
ENDS_BLOCK = ("bra", "ret", "exit", "trap")
ROW_BYTES = {"pred": 4, 16: 64, 32: 128, 64: 256, 128: 512}

# Kinds of rows that a warp fills when it starts; the numbers are those of SpecialKind in machine.cpp.
SPECIALS = {name: i for i, name in enumerate(
    ["%tid.x", "%tid.y", "%tid.z", "%laneid", "%lanemask_lt", "%lanemask_le", "%lanemask_gt", "%lanemask_ge",
     "%lanemask_eq", "%warpid", "%nwarpid"]
    + [f"%{name}.{axis}" for name in ("ntid", "ctaid", "nctaid", "clusterid", "nclusterid", "cluster_ctaid",
                                      "cluster_nctaid") for axis in "xyz"]
    + ["%cluster_ctarank", "%cluster_nctarank", "<shared address>", "%total_smem_size", "%dynamic_smem_size", "%smid"]
)}  # fmt: skip

ENCODERS = {}
for _family in (encode_arithmetic, encode_memory, encode_barriers, encode_copies, encode_tensor):
    ENCODERS |= _family.ENCODERS


class Modifiers:
    """What follows an opcode. An encoder takes what it implements; `done` refuses the rest."""

    def __init__(self, op):
        self.opcode, *self.rest = op.split(".")

    def take(self, *names):
        """The first of the names that is there, or None."""
        for name in names:
            if name in self.rest:
                self.rest.remove(name)
                return name
        return None

    def has(self, name):
        return self.take(name) is not None

    def flags(self, values):
        return sum(value for name, value in values.items() if self.has(name))

    def type(self):
        return self.rest.pop()

    def ignore(self, *names):
        """Modifiers that mean nothing here: hints, and orderings that this machine always gives."""
        for name in names:
            self.take(name)
        self.rest = [r for r in self.rest if not r.startswith(("L1::", "L2::"))]

    def done(self):
        if self.rest:
            raise Unsupported(f"modifier {'.'.join([''] + self.rest)}")


def basic_blocks(body):
    """Blocks of instructions, and the block of every label."""
    blocks, labels, current = [], {}, []
    for item in body:
        if isinstance(item, str):
            if current:
                blocks.append(current)
                current = []
            labels[item] = len(blocks)
            continue
        current.append(item)
        if item.op.split(".")[0] in ENDS_BLOCK:
            blocks.append(current)
            current = []
    if current or not blocks or any(n == len(blocks) for n in labels.values()) or blocks[-1][-1].guard:
        blocks.append(current + [Instruction("ret", [], "", False, current[-1].line if current else 0, "ret")])
    return blocks, labels


def successors(blocks, labels):
    result = []
    for i, block in enumerate(blocks):
        last = block[-1]
        opcode = last.op.split(".")[0]
        if opcode == "bra":
            after = [labels[last.args[0]]]
        elif opcode in ENDS_BLOCK:
            after = [EXIT]
        else:
            after = [i + 1]
        result.append(after + [i + 1] if last.guard and opcode in ENDS_BLOCK else after)
    return result


def post_dominators(after):
    """The immediate post-dominator of every block, EXIT if there is none but the exit."""
    count = len(after)
    leaving = 1 << count
    sets = [(1 << (count + 1)) - 1] * count
    changed = True
    while changed:
        changed = False
        for i in range(count - 1, -1, -1):
            common = -1
            for s in after[i]:
                common &= leaving if s == EXIT else sets[s]
            common = (common & ((1 << (count + 1)) - 1)) | 1 << i
            if common != sets[i]:
                sets[i], changed = common, True
    immediate = []
    for i in range(count):
        strict = sets[i] & ~(1 << i)
        rest, found = strict & ~leaving, EXIT
        while rest:
            j = (rest & -rest).bit_length() - 1
            rest &= rest - 1
            if sets[j] == strict:
                found = j
                break
        immediate.append(found)
    return immediate


class Program:
    """An entry, encoded. `lines[b]` is the PTX line at which block b begins."""

    def __init__(self, module, entry):
        self.module, self.entry = module, entry
        self.code, self.operands, self.specials = [], [], []
        self.offsets, self.constants, self.top = {}, {}, 0
        self.fixups = []
        self.layout_memory()
        blocks, labels = basic_blocks(entry.body)
        self.lines = [block[0].line for block in blocks]
        self.blocks, self.labels = blocks, labels
        self.successors = successors(blocks, labels)
        meets = post_dominators(self.successors)
        starts = []
        for i, block in enumerate(blocks):
            starts.append(len(self.code))
            self.current = block[0]
            self.guard = ""
            self.emit("block", imm=i, line=block[0].line)
            for instruction in block:
                self.encode(instruction, labels, meets[i])
        for at, target, meet in self.fixups:
            handler, guard, negated, line, first, count, _ = self.code[at]
            self.operands[first] = starts[target]
            self.code[at] = (handler, guard, negated, line, first, count, EXIT if meet == EXIT else starts[meet])
        self.core = core.Program(self.code, self.operands, self.image(), self.specials, len(blocks), self.local_bytes,
                                 self.shared_bytes)  # fmt: skip

    def retries_a_wait(self, block):
        """Whether a block only jumps back to an mbarrier's try_wait or test_wait."""
        [first, *rest] = self.blocks[block]
        if rest or first.op.split(".")[0] != "bra":
            return False
        target = self.blocks[self.labels[first.args[0]]][0]
        return target.op.startswith(("mbarrier.try_wait", "mbarrier.test_wait"))

    def layout_memory(self):
        def place(symbols, top):
            where = {}
            for name, symbol in symbols.items():
                top = -(-top // symbol.align) * symbol.align
                where[name] = top
                top += symbol.size
            return where, top

        self.shared, top = place({**self.module.shared, **self.entry.shared}, RESERVED_SHARED)
        if self.module.dynamic:
            top = -(-top // max(self.module.dynamic.values())) * max(self.module.dynamic.values())
        self.shared |= {name: top for name in self.module.dynamic}
        self.shared_bytes = top
        self.local, self.local_bytes = place(self.entry.local, 0)
        self.local_bytes = -(-self.local_bytes // 16) * 16
        offsets, self.param_bytes = self.entry.param_offsets()
        self.params = {name: offset for (name, _, _), offset in zip(self.entry.params, offsets)}

    def encode(self, instruction, labels, meet):
        self.current, self.guard = instruction, instruction.guard
        modifiers = Modifiers(instruction.op)
        try:
            if modifiers.opcode == "bra":
                modifiers.ignore("uni")
                modifiers.done()
                at = self.emit("bra", [0])
                self.fixups.append((at, labels[instruction.args[0]], meet))
            elif modifiers.opcode in ("ret", "exit"):
                modifiers.ignore("uni")
                modifiers.done()
                self.emit("exit")
            elif modifiers.opcode in ENCODERS:
                ENCODERS[modifiers.opcode](self, modifiers, instruction.args)
            else:
                raise Unsupported("opcode")
        except (Unsupported, KeyError, ValueError, IndexError, TypeError) as error:
            raise Unsupported(
                f"{self.entry.name}: PTX line {instruction.line}: {instruction.text}: "
                f"not implemented ({type(error).__name__}: {error})"
            ) from error

    def emit(self, handler, operands=(), imm=0, line=None):
        guard = self.pred(self.guard) if self.guard else -1
        number = core.handler(handler)
        if number < 0:
            raise Unsupported(f"no handler {handler}")
        first = len(self.operands)
        self.operands.extend(operands)
        negated = int(bool(self.guard) and self.current.negated)
        self.code.append((number, guard, negated, line or self.current.line, first, len(operands), imm))
        return len(self.code) - 1

    # ---- the register file ----

    def allocate(self, width):
        align = 4 if width == "pred" else 64
        self.top = -(-self.top // align) * align
        offset = self.top
        self.top += ROW_BYTES[width]
        return offset

    def register(self, name):
        if name not in self.offsets:
            self.offsets[name] = self.allocate(self.entry.registers[name])
        return self.offsets[name]

    def width(self, token):
        """Width of a register's row; None for anything else."""
        return self.entry.registers.get(token)

    def scratch(self, width):
        return self.allocate(width)

    def constant(self, bits, width):
        if width == "pred":
            bits = 0xFFFFFFFF if bits else 0
        else:
            bits &= (1 << width) - 1
        key = (bits, width)
        if key not in self.constants:
            self.constants[key] = self.allocate(width)
        return self.constants[key]

    def special(self, kind, value=0):
        key = ("special", kind, value)
        if key not in self.offsets:
            self.offsets[key] = self.allocate(32)
            self.specials.append((kind, self.offsets[key], value))
        return self.offsets[key]

    def image(self):
        """Registers start as all ones: NaN, or -1."""
        image = np.full(-(-max(self.top, 64) // 64) * 64, 0xFF, np.uint8)
        for (bits, width), offset in self.constants.items():
            if width == "pred":
                data = struct.pack("<I", bits)
            else:
                data = struct.pack({16: "<H", 32: "<I", 64: "<Q"}[width], bits) * 32
            image[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
        return image

    # ---- operands ----

    def source(self, token, width, floating=False):
        """Offset of a row of the given width: a register, an immediate, a special register or an address."""
        token = token.strip()
        if token in self.entry.registers:
            if self.entry.registers[token] != width:
                raise Unsupported(f"{token} has {self.entry.registers[token]} bits, not {width}")
            return self.register(token)
        if token.startswith("%"):
            return self.special_register(token, width)
        if token in self.params:
            return self.constant(PARAM_WINDOW + self.params[token], width)
        if token in self.local:
            return self.constant(self.local[token], width)
        if token in self.shared:
            row = self.special(SPECIALS["<shared address>"], self.shared[token])
            return row if width == 32 else self.extended(row)
        return self.constant(immediate(token, width, floating), width)

    def special_register(self, token, width):
        if token in ("%clock", "%clock_hi", "%clock64", "%globaltimer", "%globaltimer_lo"):
            row = self.scratch(width)
            self.emit("clock", [row], width)
            return row
        row = self.special(SPECIALS[token])
        return row if width == 32 else self.extended(row)

    def extended(self, row):
        wide = self.scratch(64)
        self.emit("cvt.int.64.32", [wide, row], 32 | 64 << 16)
        return wide

    def destination(self, token, width):
        if token == "_":
            return self.scratch(width)
        if self.entry.registers[token] != width:
            raise Unsupported(f"{token} has {self.entry.registers[token]} bits, not {width}")
        return self.register(token)

    def pred(self, token):
        token = token.strip()
        if token in self.entry.registers:
            return self.destination(token, "pred")
        return self.constant(int(token, 0), "pred")

    def address(self, token):
        """The three numbers of an address operand: row, displacement, whether the row has 64 bits."""
        m = re.fullmatch(r"\[\s*([%\w$#.]+)\s*(?:([+-])\s*(-?\w+))?\s*\]", token)
        if not m:
            raise Unsupported(f"address {token}")
        base, displacement = m[1], int(m[3] or "0", 0) * (-1 if m[2] == "-" else 1)
        if base in self.params:
            return [self.constant(0, 32), self.params[base] + displacement, 0]
        if base in self.local:
            return [self.constant(0, 32), self.local[base] + displacement, 0]
        if base in self.shared:
            return [self.source(base, 32), displacement, 0]
        width = self.entry.registers.get(base)
        if width is None:
            return [self.constant(int(base, 0), 64), displacement, 1]
        return [self.register(base), displacement, int(width == 64)]


def immediate(token, width, floating=False):
    """The bits of a literal."""
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", token):
        bits = int(token[2:], 16)
        if width == 64:
            return struct.unpack("<Q", struct.pack("<d", struct.unpack("<f", struct.pack("<I", bits))[0]))[0]
        return bits
    if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", token):
        return int(token[2:], 16)
    if re.fullmatch(r"-?\d+\.\d*(e[+-]?\d+)?", token):
        number = float(token)
        return (
            struct.unpack("<I", struct.pack("<f", number))[0]
            if width == 32
            else struct.unpack("<Q", struct.pack("<d", number))[0]
        )
    value = int(token.rstrip("U"), 0)
    if floating:
        return (
            struct.unpack("<I", struct.pack("<f", value))[0]
            if width == 32
            else struct.unpack("<Q", struct.pack("<d", value))[0]
        )
    return value & ((1 << width) - 1)
