"""Fault injection: programs with one detail broken, and what notices it.

A mutant is a text with one edit: a wait, fence, commit or arrival dropped, a parity flipped, a byte count, descriptor,
swizzle or offset changed. `judge` runs it under several policies until something is wrong.
"""

import json
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # this folder's modules have common names

from ptx_emulator import launch as emulator
from ptx_emulator.parser import Unsupported

RECORDS = Path(__file__).resolve().parents[2] / "build" / "ptx_emulator" / "faults"

GUARD = r"(?:@!?[%\w$]+\s+)?"
# Policies in the order in which they are tried.
POLICIES = (
    "eager+race",
    "late+race",
    "random2+race",
    "random1+race",
    "late:wgmma",
    "late:tma",
    "late:tcgen05",
    "late:bulk store",
)


@dataclass
class Mutant:
    kind: str
    line: int
    text: str  # of the whole program
    edited: str  # the instruction as it was


def dropped(match):
    return ""


def never_waits(match):
    return f"setp.eq.b32 {match[1]}, 0, 0;"


def other_parity(match):
    return (
        f"{{ .reg .b32 flip; xor.b32 flip, {match[3]}, 1; {match[0].replace(match[3] + match[4], 'flip' + match[4])} }}"
    )


def plus(amount):
    """Adds to the last operand."""

    def edit(match):
        return f"{{ .reg .b32 more; add.s32 more, {match[2]}, {amount}; {match[1]} more; }}"

    return edit


def one_group_more(match):
    return f"{match[1]} {int(match[2]) + 1};"


def toggled(bits):
    def edit(match):
        return str((int(match[0]) ^ bits) & (1 << 64) - 1)

    return edit


def moved(amount):
    """Adds to the displacement of the first address."""

    def edit(match):
        return f"{match[1]}[{match[2]}+{int(match[3] or 0) + amount}]"

    return edit


def other_constant(match):
    return f"{match[1]}{int(match[2]) ^ 16};"


WAIT = r"mbarrier\.(?:try|test)_wait\S*\s+([%\w$]+),\s*(\[[^\]]*\]),\s*([%\w$]+)(\s*,[^;]*;|\s*;)"
LARGE = r"(?<![\w%])-?\d{18,20}(?!\w)"  # a descriptor without its start
UPPER = r"(?<=, )10737(?!41824)\d{5}(?=;)"  # the upper half of Hopper's with a swizzle of 128 bytes
# (kind, pattern, edit, most mutants of the kind)
CATALOGUE = [
    ("barrier dropped", GUARD + r"(?:bar|barrier)\.(?:cta\.)?(?:sync|arrive)(?:\.aligned)?\s[^;]*;", dropped, 99),
    ("cluster barrier wait dropped", GUARD + r"barrier\.cluster\.wait[^;]*;", dropped, 99),
    ("mbarrier wait dropped", WAIT, never_waits, 99),
    ("parity flipped", WAIT, other_parity, 10),
    ("cp.async wait dropped", r"cp\.async\.wait_\w+[^;]*;", dropped, 99),
    ("wgmma wait dropped", r"wgmma\.wait_group[^;]*;", dropped, 99),
    ("bulk wait dropped", r"cp\.async\.bulk\.wait_group[^;]*;", dropped, 99),
    ("a group more may be pending", r"((?:wgmma|cp\.async)\.wait_group\S*)\s+(\d+);", one_group_more, 99),
    ("commit dropped", r"(?:wgmma|cp\.async|cp\.async\.bulk)\.commit_group[^;]*;", dropped, 99),
    ("tcgen05.commit dropped", GUARD + r"tcgen05\.commit[^;]*;", dropped, 99),
    ("tcgen05.wait::st dropped", r"tcgen05\.wait::st[^;]*;", dropped, 99),
    ("proxy fence dropped", r"fence\.proxy\.async[^;]*;", dropped, 99),
    ("arrival dropped", GUARD + r"mbarrier\.arrive\.(?!expect)[^;]*;", dropped, 10),
    ("byte count", GUARD + r"(mbarrier\.arrive\.expect_tx[^;\]]*\],)\s*([%\w$]+);", plus(16), 99),
    ("arrival count", GUARD + r"(mbarrier\.init[^;\]]*\],)\s*([%\w$]+);", plus(1), 10),
    ("descriptor swizzle", LARGE, toggled(3 << 62), 6),
    ("descriptor stride", LARGE, toggled(1 << 34), 6),
    ("descriptor swizzle", UPPER, toggled(3 << 30), 6),
    ("descriptor stride", UPPER, toggled(1 << 2), 6),
    ("swizzle constant", r"(xor\.b32\s+[%\w$]+,\s*[%\w$]+,\s*)(16|32|48|64|80|96|112);", other_constant, 8),
    ("shared load moved", r"(ld\.shared[.\w]*\s+[^;\[]*)\[([%\w$]+)(?:\+(\d+))?\]", moved(16), 8),
    ("shared store moved", r"(st\.shared[.\w]*\s+)\[([%\w$]+)(?:\+(\d+))?\]", moved(16), 8),
    ("matrix load moved", r"(ldmatrix[.\w:]*\s+[^;\[]*)\[([%\w$]+)(?:\+(\d+))?\]", moved(16), 6),
    ("matrix store moved", r"(stmatrix[.\w:]*\s+)\[([%\w$]+)(?:\+(\d+))?\]", moved(16), 6),
    ("cp.async moved", r"(cp\.async\.c[ag][.\w:]*\s+)\[([%\w$]+)(?:\+(\d+))?\]", moved(16), 6),
    ("st.async moved", r"(st\.async[.\w:]*\s+)\[([%\w$]+)(?:\+(\d+))?\]", moved(16), 8),
    ("TMA destination moved", r"(cp\.async\.bulk\.tensor\S*\s+)\[([%\w$]+)(?:\+(\d+))?\](?!\s*,\s*\{)", moved(1024), 6),
    ("tensor memory moved", r"(tcgen05\.st\S*\s+)\[([%\w$]+)(?:\+(\d+))?\]", moved(1), 4),
    ("tensor memory moved", r"(tcgen05\.ld\S*\s+[^;\[]*)\[([%\w$]+)(?:\+(\d+))?\]", moved(1), 6),
]


def limited(policy, instructions=3_000_000):
    """The policy with an end for programs that spin."""
    made = emulator.Policy.parse(policy)
    made.max_instructions = instructions
    return made


def replaced(text, match):
    """Whether what follows throws the upper half of a 64-bit constant away, as CuTe does when it adds an address."""
    halves = re.match(r"[^;\n]*;\s*mov\.b64\s+\{[%\w]+, ([%\w]+)\}", text[match.end() :])
    return bool(halves) and len(re.findall(re.escape(halves[1]) + r"\b", text)) == 1


def executed_lines(program):
    """PTX lines of the blocks that have run."""
    hits, lines = program.core.hits(), set()
    for count, block in zip(hits, program.blocks):
        if count:
            lines.update(instruction.line for instruction in block)
    return lines


def mutants(text, program):
    """Mutants of a program that has run: of what it executed, per kind evenly over the program, at most as many as the
    catalogue says. Waits that only ever were for the phase before the first are left alone: they never wait.
    """
    result, lines, waits = [], executed_lines(program), program.core.real_waits()
    for kind, pattern, edit, most in CATALOGUE:
        found = []
        for match in re.finditer(pattern, text):
            line = text.count("\n", 0, match.start()) + 1
            if pattern == LARGE and replaced(text, match):
                continue
            if line in lines and (pattern != WAIT or line in waits):
                found.append((line, match))
        step = -(-len(found) // most)
        for line, match in found[:: step or 1]:
            changed = text[: match.start()] + edit(match) + text[match.end() :]
            result.append(Mutant(kind, line, changed, " ".join(match[0].split())))
    return result


def judge(run, mutant, policies=POLICIES):
    """What notices the mutant, or None. `run(text, policy)` returns (result right?, reports)."""
    for policy in policies:
        try:
            right, reports = run(mutant.text, policy)
        except Unsupported:
            raise
        except emulator.DeadlockError:
            return f"{policy}: deadlock"
        except emulator.EmulatorError:
            return f"{policy}: fault"
        if reports:
            return f"{policy}: {'race' if reports[0].startswith('race') else 'report'}"
        if not right:
            return f"{policy}: wrong result"
    return None


def table(verdicts):
    """Markdown: per kind the number of mutants and of those noticed, and by what."""
    rows = ["| fault | mutants | noticed | by |", "|---|---|---|---|"]
    for kind in dict.fromkeys(m.kind for m, _ in verdicts):
        mine = [v for m, v in verdicts if m.kind == kind]
        by = Counter(v.split(": ")[1] for v in mine if v)
        rows.append(f"| {kind} | {len(mine)} | {sum(v is not None for v in mine)} | "
                    + ", ".join(f"{what} {n}" for what, n in by.most_common()) + " |")  # fmt: skip
    total = sum(v is not None for _, v in verdicts)
    return "\n".join([*rows, f"| all | {len(verdicts)} | {total} | |"])


def record(name, verdicts):
    """Keeps what noticed a program's mutants in build/, for the tables of the documentation."""
    RECORDS.mkdir(parents=True, exist_ok=True)
    rows = [(mutant.kind, mutant.line, mutant.edited, by) for mutant, by in verdicts]
    (RECORDS / f"{name}.json").write_text(json.dumps(rows, indent=1) + "\n")


def main():
    """The tables: by kind, by program, and what nothing noticed."""
    every, programs, left = [], [], []
    for path in sorted(RECORDS.glob("*.json")):
        rows = json.loads(path.read_text())
        every += [(Mutant(kind, line, "", ""), by) for kind, line, _, by in rows]
        seen = sum(by is not None for *_, by in rows)
        programs.append(f"| {path.stem} | {len(rows)} | {seen} |")
        left += [f"| {path.stem} | {line} | {kind} | `{edited}` |" for kind, line, edited, by in rows if by is None]
    print(table(every))
    print("\n| program | mutants | noticed |\n|---|---|---|", *programs, sep="\n")
    print("\n| not noticed in | PTX line | fault | at |\n|---|---|---|---|", *left, sep="\n")


if __name__ == "__main__":
    main()
