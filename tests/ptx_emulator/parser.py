"""PTX text to statements.

The dialect is what NVVM emits: entry functions only, `{ }` scopes with registers and labels of their own (inline asm).
Scopes are flattened here: what a scope declares gets a name of its own.
"""

import bisect
import re
from dataclasses import dataclass, field

SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}
# Declared register type to the width of its row; "pred" is a mask.
REGISTER_WIDTHS = {"pred": "pred", "b8": 16, "b16": 16, "u16": 16, "s16": 16, "f16": 16}
REGISTER_WIDTHS |= {k: 32 for k in ("b32", "u32", "s32", "f32")} | {k: 64 for k in ("b64", "u64", "s64", "f64")}
REGISTER_WIDTHS["b128"] = 128


class Unsupported(Exception):
    """Something that the emulator doesn't implement; the text names the PTX line."""


@dataclass
class Instruction:
    op: str
    args: list
    guard: str  # predicate register or ""
    negated: bool
    line: int
    text: str


@dataclass
class Symbol:
    size: int
    align: int


@dataclass
class Entry:
    name: str
    params: list = field(default_factory=list)  # (name, size, align)
    body: list = field(default_factory=list)  # Instruction, or the name of a label
    registers: dict = field(default_factory=dict)  # name -> width
    shared: dict = field(default_factory=dict)  # name -> Symbol
    local: dict = field(default_factory=dict)
    threads: tuple = ()  # .reqntid, or () if any number will do
    cluster: tuple = ()  # .reqnctapercluster

    def param_offsets(self):
        """Offsets of the parameters in a packed block, and its size."""
        offset, offsets = 0, []
        for _, size, align in self.params:
            offset = -(-offset // align) * align
            offsets.append(offset)
            offset += size
        return offsets, offset


@dataclass
class Module:
    entries: dict
    shared: dict  # name -> Symbol; of all entries
    dynamic: dict  # extern shared arrays: name -> alignment
    target: str


STATEMENT = re.compile(r"\s*(?:(?P<brace>[{}])|(?P<label>[%$\w]+)\s*:(?!:)|(?P<statement>[^;]*);)")
PARAM = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.[bfus](\d+)\s+"
    r"(?:\.ptr\s+(?:\.\w+\s+)?(?:\.align\s+\d+\s+)?)?([\w$]+)(?:\[(\d+)\])?"
)
ARRAY = re.compile(
    r"(?:\.extern\s+|\.visible\s+)?\.(shared|local)\s+(?:\.align\s+(\d+)\s+)?\.[bfus](\d+)\s+([\w$]+)(?:\[(\d*)\])?"
)
NAME = re.compile(r"[%A-Za-z_$][\w$]*")


def split_arguments(text):
    """At commas outside of any bracket."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        if c in "{[(":
            depth += 1
        elif c in "}])":
            depth -= 1
        elif c == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    last = text[start:].strip()
    return parts + [last] if last else parts


def parse(text):
    """The entries of a PTX file."""
    text = re.sub(r"//[^\n]*", "", text)
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m.group(0).count("\n"), text, flags=re.DOTALL)
    newlines = [m.start() for m in re.finditer("\n", text)]
    target = re.search(r"\.target\s+([\w, ]+)", text)
    module = Module({}, {}, {}, target.group(1).strip() if target else "")
    position = 0
    for m in re.finditer(r"\.entry\s+([\w$]+)\s*(\((.*?)\))?([^{;]*)\{", text, re.DOTALL):
        declare_shared(module, text[position : m.start()])
        entry = Entry(m.group(1))
        for align, bits, name, count in PARAM.findall(m.group(3) or ""):
            size = SIZES[bits]
            entry.params.append((name, size * int(count or 1), int(align or size)))
        for directive, attribute in (("reqntid", "threads"), ("reqnctapercluster", "cluster")):
            if found := re.search(rf"\.{directive}\s+([\d, ]+)", m.group(4)):
                numbers = [int(x) for x in found.group(1).split(",")]
                setattr(entry, attribute, tuple(numbers + [1] * (3 - len(numbers))))
        position = Body(entry, text, newlines).read(m.end())
        module.entries[entry.name] = entry
    if not module.entries:
        raise Unsupported("no .entry in this PTX")
    return module


def declare_shared(module, text):
    for m in ARRAY.finditer(text):
        space, align, bits, name, count = m.groups()
        if space != "shared":
            continue
        size = SIZES[bits]
        if count == "" or ".extern" in m.group(0):
            module.dynamic[name] = int(align or size)
        else:
            module.shared[name] = Symbol(size * int(count or 1), int(align or size))


class Body:
    """Reads one entry's statements."""

    def __init__(self, entry, text, newlines):
        self.entry, self.text, self.newlines = entry, text, newlines
        self.scopes = [{}]  # name as written -> flat name, from the outermost scope in
        self.number = 0
        self.pending = []  # branches whose label is looked up at the end of their scope

    def line_of(self, position):
        return bisect.bisect_left(self.newlines, position) + 1

    def read(self, position):
        """Returns the position behind the entry's closing brace."""
        while True:
            m = STATEMENT.match(self.text, position)
            if not m:
                raise Unsupported(f"PTX line {self.line_of(position)}: unfinished statement")
            position = m.end()
            if m["brace"] == "{":
                self.number += 1
                self.scopes.append({})
            elif m["brace"] == "}":
                self.scopes.pop()
                if not self.scopes:
                    self.resolve_labels()
                    return position
            elif m["label"]:
                name = self.flat(m["label"])
                self.scopes[-1][m["label"]] = name
                self.entry.body.append(name)
            else:
                self.statement(m["statement"].strip(), self.line_of(m.start("statement")))

    def flat(self, name):
        return name if len(self.scopes) == 1 else f"{name}#{self.number}"

    def statement(self, text, line):
        if not text or text.startswith((".pragma", ".loc", ".file")):
            return
        if text.startswith(".reg"):
            return self.declare_registers(text, line)
        if text.startswith((".shared", ".local")):
            m = ARRAY.match(text)
            symbol = Symbol(SIZES[m[3]] * int(m[5] or 1), int(m[2] or SIZES[m[3]]))
            (self.entry.shared if m[1] == "shared" else self.entry.local)[m[4]] = symbol
            return
        if text.startswith("."):
            raise Unsupported(f"PTX line {line}: {text}")
        guard, negated, rest = "", False, text
        if m := re.match(r"@(!?)\s*([%\w$]+)\s+(.*)", text, re.DOTALL):
            negated, guard, rest = m[1] == "!", m[2], m[3]
        op, arguments = re.match(r"(\S+)\s*(.*)", rest, re.DOTALL).groups()
        if len(self.scopes) > 1:
            arguments, guard = self.renamed(arguments), self.renamed(guard)
        instruction = Instruction(op, split_arguments(arguments), guard, negated, line, " ".join(text.split()))
        self.entry.body.append(instruction)
        if op.split(".")[0] == "bra":
            self.pending.append((instruction, list(self.scopes)))

    def declare_registers(self, text, line):
        m = re.match(r"\.reg\s+\.(\w+)\s+(.*)", text, re.DOTALL)
        if m[1] not in REGISTER_WIDTHS:
            raise Unsupported(f"PTX line {line}: registers of type {m[1]}")
        for declared in m[2].split(","):
            declared = declared.strip()
            if many := re.match(r"([%\w$]+)<(\d+)>$", declared):
                names = [f"{many[1]}{i}" for i in range(int(many[2]))]
            else:
                names = [declared]
            for name in names:
                self.scopes[-1][name] = self.flat(name)
                self.entry.registers[self.flat(name)] = REGISTER_WIDTHS[m[1]]

    def renamed(self, text):
        def lookup(m):
            for scope in reversed(self.scopes):
                if m.group(0) in scope:
                    return scope[m.group(0)]
            return m.group(0)

        return NAME.sub(lookup, text)

    def resolve_labels(self):
        """A branch may name a label that its scope declares further down."""
        labels = {item for item in self.entry.body if isinstance(item, str)}
        for instruction, scopes in self.pending:
            for scope in reversed(scopes):
                if scope.get(instruction.args[0]) in labels:
                    instruction.args[0] = scope[instruction.args[0]]
                    break
            if instruction.args[0] not in labels:
                raise Unsupported(f"PTX line {instruction.line}: {instruction.text}: no such label")
