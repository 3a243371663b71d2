"""Fault injection: programs with one detail broken, and what notices it.

A mutant is a text with one edit: a wait, fence, commit or arrival dropped, a parity flipped, a byte count, descriptor,
swizzle or offset changed. `judge` runs it under several policies until something is wrong. Some policies are edits of the
text too, which change no correct program: some warps fall behind at every wait, or shared memory begins as something else.
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
# Policies in the order in which they are tried; behind the comma: one of VARIATIONS.
POLICIES = (
    "eager+race",
    "late+race",
    "random2+race",
    "random1+race",
    "late:wgmma",
    "late:tma",
    "late:tcgen05",
    "late:bulk store",
    *(f"eager, warpgroup {i} falls behind" for i in range(4)),
    *(f"eager, warp {i} of four falls behind" for i in range(4)),
    *(f"eager, other shared memory {i}" for i in range(3)),
)
BEFORE, BEHIND = 6, 3  # instructions around a mutant by which it is known again


@dataclass
class Mutant:
    kind: str
    line: int
    text: str  # of the whole program
    edited: str  # the instruction as it was
    around: str = ""  # instructions about it, in one line, without the numbers of registers and labels


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


def limited(policy, instructions=10_000_000):
    """The policy with an end for programs that spin."""
    made = emulator.Policy.parse(policy.partition(",")[0])
    made.max_instructions = instructions
    return made


def behind(shift, mask, value):
    """An edit: warps whose (thread >> shift) & mask is `value` let all others go on at every wait and barrier."""
    sleep = " @!slow bra awake;" + " nanosleep.u32 1;" * 3 + " awake:"
    pause = f" {{ .reg .pred slow; .reg .b32 me; mov.u32 me, %tid.x; shr.u32 me, me, {shift}; and.b32 me, me, {mask};"
    pause += f" setp.eq.u32 slow, me, {value};{sleep} }}"
    waits = re.compile(r"^.*(?:mbarrier\.(?:try|test)_wait|\b(?:bar|barrier)\.(?:cta\.)?sync).*[};]$", re.MULTILINE)
    return lambda text: waits.sub(lambda match: match[0] + pause, text)


def filled(even, odd):
    """An edit: the first warp fills shared memory with two words in turn before the other warps run."""
    fill = (
        "\n{ .reg .pred go, even; .reg .b32 at, left, bits; mov.u32 left, %tid.x; setp.gt.u32 go, left, 31; "
        "@go bra filled; shl.b32 at, left, 2; mov.u32 bits, __dynamic_shmem__0; add.u32 at, at, bits; "
        "and.b32 bits, at, 4; setp.eq.u32 even, bits, 0; mov.u32 left, %dynamic_smem_size; "
        f"selp.b32 bits, {even}, {odd}, even; "
        "fill: st.shared.b32 [at], bits; add.u32 at, at, 128; sub.s32 left, left, 128; setp.gt.s32 go, left, 0; "
        "@go bra fill; fence.proxy.async.shared::cta; filled: }\n"
    )
    declared = re.compile(r"^\{\n(?:\s*\.reg[^;]*;.*\n)+", re.MULTILINE)
    return lambda text: declared.sub(lambda match: match[0] + fill, text, count=1)


VARIATIONS = {
    **{f"warpgroup {i} falls behind": behind(7, 7, i) for i in range(4)},
    **{f"warp {i} of four falls behind": behind(5, 3, i) for i in range(4)},
    **{f"other shared memory {i}": filled(*words) for i, words in enumerate(((0, 0), (-1, 0), (0, -1)))},
}


def varied(text, policy):
    """The text as a policy wants it."""
    variation = policy.partition(", ")[2]
    return VARIATIONS[variation](text) if variation else text


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


def plain(line):
    """An instruction without the numbers of registers and labels, which every compilation draws anew."""
    return re.sub(r"\$L\w+", "$L", re.sub(r"(%[a-z]+)\d+", r"\1", " ".join(line.split())))


def surroundings(text, match):
    """The instruction between its neighbours: marked, in one line."""

    def instructions(part):
        lines = (line.strip() for line in part.splitlines())
        return [plain(line) for line in lines if line and not line.startswith(("//", "."))]

    before, behind = text.rfind("\n", 0, match.start()) + 1, text.find("\n", match.end())
    near = (
        instructions(text[max(0, before - 4000) : before])[-BEFORE:],
        instructions(text[behind : behind + 4000])[:BEHIND],
    )
    here = (
        plain(text[before : match.start()]),
        plain(text[match.start() : match.end()]),
        plain(text[match.end() : behind]),
    )
    return " ".join([*near[0], here[0], ">>", *here[1:], *near[1]])


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
            around = surroundings(text, match)
            result.append(Mutant(kind, line, changed, " ".join(match[0].split()), around))
    return result


def judge(problems, mutant, policies=POLICIES):
    """What notices the mutant, or None. Each problem: `run(text, policy)` returns (result right?, reports)."""
    for policy in policies:
        for number, run in enumerate(problems):
            if what := trial(run, mutant.text, policy):
                return f"{policy}: {what}" + (f" in problem {number + 1}" if number else "")
    return None


def trial(run, text, policy):
    """What is wrong with one run, or None."""
    try:
        right, reports = run(varied(text, policy), policy)
    except Unsupported:
        raise
    except emulator.DeadlockError:
        return "deadlock"
    except emulator.EmulatorError:
        return "fault"
    if reports:
        return "race" if reports[0].startswith("race") else "report"
    return None if right else "wrong result"


def table(verdicts):
    """Markdown: per kind the number of mutants and of those noticed, and by what."""
    rows = ["| fault | mutants | noticed | by |", "|---|---|---|---|"]
    for kind in dict.fromkeys(m.kind for m, _ in verdicts):
        mine = [v for m, v in verdicts if m.kind == kind]
        by = Counter(v.split(": ")[1].split(" in problem")[0] for v in mine if v)
        rows.append(f"| {kind} | {len(mine)} | {sum(v is not None for v in mine)} | "
                    + ", ".join(f"{what} {n}" for what, n in by.most_common()) + " |")  # fmt: skip
    total = sum(v is not None for _, v in verdicts)
    return "\n".join([*rows, f"| all | {len(verdicts)} | {total} | |"])


def record(name, verdicts, reasons):
    """Keeps what noticed a program's mutants in build/, for docs/mutation.md. `reasons`: why one is harmless, or None."""
    RECORDS.mkdir(parents=True, exist_ok=True)
    rows = [
        {"kind": m.kind, "line": m.line, "at": m.edited, "around": m.around, "by": by, "harmless": why}
        for (m, by), why in zip(verdicts, reasons)
    ]
    (RECORDS / f"{name}.json").write_text(json.dumps(rows, indent=1) + "\n")


def main():
    """By kind, and what nothing noticed."""
    every, left = [], []
    for path in sorted(RECORDS.glob("*.json")):
        rows = json.loads(path.read_text())
        every += [(Mutant(row["kind"], row["line"], "", ""), row["by"]) for row in rows]
        left += [
            f"{path.stem}, PTX line {row['line']}: {row['kind']}, {row['harmless'] or 'NOT DECLARED'}\n    {row['around']}"
            for row in rows
            if row["by"] is None
        ]
    print(table(every), "", *left, sep="\n")


if __name__ == "__main__":
    main()
