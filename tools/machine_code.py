"""What the shipped cubins hold: registers, shared memory, stack and instructions, as a table.

    python tools/machine_code.py [--kernels build/kernels] [--out docs/machine_code.md]

Disassembles with nvdisasm (nvidia-cuda-nvdisasm on PyPI; or the one on the PATH). tests/test_machine_code.py builds its gates on
this module.
"""

import argparse
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from project import ROOT

# Columns of the table: what stands in it, and the opcodes counted.
MIX = {
    "matrix": r"HMMA|HGMMA|QGMMA|UTC\w*MMA",
    "TMA, bulk": r"UTMALDG|UTMASTG|UBLKCP|UTMAREDG|UBLKRED",
    "tensor memory": r"LDTM|STTM",
    "special functions": r"MUFU",
    "shared": r"LDS|LDSM|STS|STSM|ATOMS",
    "global": r"LDG|STG|LDGSTS|RED|REDG|ATOMG",
    "local": r"LDL|STL",
}
MATRIX = re.compile(MIX["matrix"])
# An integer division by a variable becomes a conversion to float and back, or a call.
DIVISION = re.compile(r"I2F|F2I|CALL|I2FP")
# Of a loop that does the work of a kernel: products, or accumulators in tensor memory.
WORK = re.compile(rf"({MIX['matrix']}|LDTM)\S*")

_LABEL = re.compile(r"^(\.L_x_\d+):")
_LINE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)(\S*)\s*(.*?)\s*;")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")


@dataclass
class Instruction:
    guard: str  # a predicate, or ""
    opcode: str  # without modifiers
    modifiers: str
    operands: str


@dataclass
class MachineCode:
    """The instructions of a cubin's one kernel, in order, and where its labels stand among them."""

    instructions: list[Instruction]
    labels: dict[str, int]

    def mix(self) -> Counter:
        counts = Counter(i.opcode for i in self.instructions)
        found = {name: sum(n for op, n in counts.items() if re.fullmatch(what, op)) for name, what in MIX.items()}
        return Counter(found, all=len(self.instructions) - counts["NOP"])

    def blocks(self) -> tuple[list[int], list[list[int]]]:
        """(first instruction, successors) of the basic blocks."""
        starts = {0, *self.labels.values()}
        starts |= {at + 1 for at, i in enumerate(self.instructions) if i.opcode in ("BRA", "EXIT", "RET", "BRX")}
        first = sorted(x for x in starts if x < len(self.instructions))
        number = {at: b for b, at in enumerate(first)}
        after = []
        for b, at in enumerate(first):
            end = first[b + 1] if b + 1 < len(first) else len(self.instructions)
            last, targets = self.instructions[end - 1], []
            # A branch on a uniform predicate names it as an operand.
            always = not last.guard and not re.match(r"!?U?P\d", last.operands)
            if last.opcode == "BRA" and (target := _TARGET.search(last.operands)):
                targets.append(number[self.labels[target[1]]])
            if b + 1 < len(first) and not (last.opcode in ("BRA", "EXIT", "RET", "BRX") and always):
                targets.append(b + 1)
            after.append(targets)
        return first, after

    def loops(self) -> list[list[int]]:
        """The natural loops as sets of blocks, those of one header together."""
        _, after = self.blocks()
        count = len(after)
        before = [[] for _ in range(count)]
        for b, targets in enumerate(after):
            for t in targets:
                before[t].append(b)
        reached, todo = {0}, [0]
        while todo:
            for t in after[todo.pop()]:
                if t not in reached:
                    reached.add(t)
                    todo.append(t)
        every = frozenset(reached)
        dominators = {b: every for b in reached}
        dominators[0] = frozenset([0])
        changed = True
        while changed:
            changed = False
            for b in sorted(reached - {0}):
                new = frozenset.intersection(*(dominators[p] for p in before[b] if p in reached)) | {b}
                changed |= new != dominators[b]
                dominators[b] = new
        loops = {}
        for b in reached:
            for header in after[b]:
                if header in dominators[b]:
                    body, todo = loops.setdefault(header, {header}), [b]
                    while todo:
                        x = todo.pop()
                        if x not in body:
                            body.add(x)
                            todo += [p for p in before[x] if p in reached]
        return [sorted(body) for body in loops.values()]

    def work_loops(self) -> list[list[Instruction]]:
        """The innermost loops in which products or accumulators stand."""
        first, _ = self.blocks()
        ends = [*first[1:], len(self.instructions)]
        bodies = [
            (set(loop), [i for b in loop for i in self.instructions[first[b] : ends[b]]]) for loop in self.loops()
        ]
        holding = [
            (blocks, body) for blocks, body in bodies if any(WORK.fullmatch(i.opcode + i.modifiers) for i in body)
        ]
        return [body for blocks, body in holding if not any(other < blocks for other, _ in holding)]


def disassembler() -> str | None:
    """nvdisasm as installed from PyPI, else the one on the PATH, else None."""
    try:
        for file in importlib.metadata.files("nvidia-cuda-nvdisasm") or []:
            if file.name == "nvdisasm":
                return str(Path(str(file.locate())).resolve())
    except importlib.metadata.PackageNotFoundError:
        pass
    return shutil.which("nvdisasm")


def disassemble(cubin: Path, program: str) -> MachineCode:
    done = subprocess.run([program, "-c", str(cubin)], capture_output=True, text=True, check=True)
    code = MachineCode([], {})
    for line in done.stdout.splitlines():
        if label := _LABEL.match(line):
            code.labels[label[1]] = len(code.instructions)
        elif found := _LINE.match(line):
            guard, *rest = found.groups()
            code.instructions.append(Instruction(guard or "", *rest))
    if not code.instructions:
        raise ValueError(f"{cubin}: nvdisasm printed no instruction")
    return code


def table(kernels: Path, program: str) -> str:
    index = json.loads((kernels / "index.json").read_text())
    with ThreadPoolExecutor() as pool:
        cubins = [kernels / f"{facts['name']}.cubin" for facts in index]
        mixes = dict(zip(cubins, pool.map(lambda cubin: disassemble(cubin, program).mix(), cubins)))
    head = ["program", "arch", "threads", "registers", "shared memory", "stack", "instructions", *MIX]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for facts in sorted(index, key=lambda f: (f["program"], len(f["arch"]), f["arch"])):
        mix = mixes[kernels / f"{facts['name']}.cubin"]
        threads = facts["block"][0] * facts["block"][1] * facts["block"][2]
        cells = [
            facts["program"],
            facts["arch"],
            threads,
            facts["registers"],
            facts["dynamic_smem"],
            facts["stack_bytes"],
        ]
        lines.append("| " + " | ".join(map(str, [*cells, mix["all"], *(mix[name] for name in MIX)])) + " |")
    return "\n".join(lines)


HEAD = """# Machine code of the shipped programs

Generated by `python tools/machine_code.py` from the cubins of a build and nvdisasm's listing of them; `tests/test_machine_code.py`
compares it with the build at hand and holds the gates. Registers: of a thread at launch (kernels with roles move them between warps
later). Shared memory: dynamic, in bytes. Stack: local memory of a thread, bytes; a spill shows there. Then static counts of
instructions: of all but NOP, and of the kinds named. A kernel file may compile to one of two forms that differ in some of
these counts ([aot.md](aot.md)).

"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", type=Path, default=ROOT / "build" / "kernels")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "machine_code.md")
    options = parser.parse_args()
    program = disassembler()
    if program is None:
        sys.exit("nvdisasm is needed: pip install nvidia-cuda-nvdisasm")
    options.out.write_text(HEAD + table(options.kernels, program) + "\n")
    print(options.out)


if __name__ == "__main__":
    main()
