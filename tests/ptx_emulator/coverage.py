"""Which basic blocks of the shipped programs have run, and why the others can't.

The last test of a file calls `Emulation.check_coverage`, which leaves a record in build/ptx_emulator/coverage. The
table of docs/ptx_emulator.md, after a run of all tests/test_emulated_*.py:

    python tests/ptx_emulator/coverage.py
"""

import json
import re
import sys
from pathlib import Path

BUILD = Path(__file__).resolve().parents[2] / "build"
RECORDS = BUILD / "ptx_emulator" / "coverage"
RETRY = "jump back to a wait that has given up"
# Comparisons of a number of at least 1 whose result is known.
TRUE = {("gt", 0), ("ge", 0), ("ge", 1), ("ne", 0)}
FALSE = {("lt", 0), ("lt", 1), ("le", 0), ("eq", 0)}


def unreachable(program, successors, positive):
    """Blocks that no path reaches where the parameters of these numbers are at least 1."""
    definitions = {}
    for block in program.blocks:
        for instruction in block:
            for register in re.findall(r"[%\w$]+", instruction.args[0]) if instruction.args else ():
                definitions.setdefault(register, []).append(instruction)

    def only_definition(register):
        found = definitions.get(register, ())
        return found[0] if len(found) == 1 and not found[0].guard else None

    def known(predicate):
        """The value of a predicate, or None."""
        compared = only_definition(predicate)
        if compared is None or not (m := re.fullmatch(r"setp\.(\w+)\.[su](?:32|64)", compared.op)):
            return None
        loaded = only_definition(compared.args[1])
        if loaded is None or not loaded.op.startswith("ld.param"):
            return None
        if loaded.args[1] not in {f"[{program.entry.params[i][0]}]" for i in positive if i < len(program.entry.params)}:
            return None
        try:
            case = (m[1], int(compared.args[2]))
        except ValueError:
            return None
        return True if case in TRUE else False if case in FALSE else None

    reached, todo = set(), [0]
    while todo:
        b = todo.pop()
        if b < 0 or b in reached:
            continue
        reached.add(b)
        last, after = program.blocks[b][-1], successors[b]
        taken = known(last.guard) if last.guard and len(after) == 2 else None
        if taken is not None:
            after = after[:1] if taken != last.negated else after[1:]
        todo += after
    return set(range(len(program.blocks))) - reached


def missing(program, positive=(), reasons=()):
    """([(PTX line, text) of blocks that ran nowhere and have no reason], {reason: blocks}).

    positive: numbers of the parameters that the launcher never passes below 1. reasons: {start of a block's first
    instruction, or of any of its instructions after "...": why it is out of reach}.
    """
    hits, left, excused = program.core.hits(), [], {}
    beyond = unreachable(program, program.successors, positive) if positive else ()
    for b, count in enumerate(hits):
        if count:
            continue
        texts = [instruction.text for instruction in program.blocks[b]]
        reason = "a parameter below 1" if b in beyond else RETRY if program.retries_a_wait(b) else None
        for start, why in dict(reasons).items():
            where = texts if start.startswith("...") else texts[:1]
            if reason is None and any(text.startswith(start.removeprefix("...")) for text in where):
                reason = why
        if reason:
            excused[reason] = excused.get(reason, 0) + 1
        else:
            left.append((program.lines[b], texts[0]))
    return left, excused


def record(name, programs):
    """name: kernel-arch. programs: {entry: (blocks, {reason: blocks out of reach})}."""
    RECORDS.mkdir(parents=True, exist_ok=True)
    (RECORDS / f"{name}.json").write_text(json.dumps(programs, indent=1) + "\n")


def table():
    """Of every kernel on sm_90a, and of those on other architectures that a test has looked at."""
    index = json.loads((BUILD / "kernels" / "index.json").read_text())
    names = dict.fromkeys(f"{facts['kernel']}-{facts['arch']}" for facts in index)
    rows = ["| kernel | programs | blocks | executed | out of reach |", "|---|---|---|---|---|"]
    for name in names:
        path = RECORDS / f"{name}.json"
        if not path.exists() and not name.endswith("-sm_90a"):
            continue
        programs = json.loads(path.read_text())
        blocks, reasons = sum(blocks for blocks, _ in programs.values()), {}
        for _, excused in programs.values():
            for reason, count in excused.items():
                reasons[reason] = reasons.get(reason, 0) + count
        executed = blocks - sum(reasons.values())
        why = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
        rows.append(f"| {name} | {len(programs)} | {blocks} | {executed} | {why} |")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.path.pop(0)  # this folder's modules have common names
    print(table())
