"""Write docs/reliability.md from the figures in docs/measurements: what was tried, what was found, what is noticed.

    python tools/reliability.py [--check]

The figures come from the commands named beside them; this script adds nothing but sums.
"""

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from project import ROOT

DOCUMENT = ROOT / "docs" / "reliability.md"
MEASUREMENTS = ROOT / "docs" / "measurements"


def load(name: str) -> dict:
    return json.loads((MEASUREMENTS / name).read_text())


def table(header: tuple, rows: list) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def number(count: int) -> str:
    return f"{count:,}"


def properties(figures: dict) -> str:
    """Examples by operation and backend, and the largest share of the error bound."""
    rows = []
    for run in figures["runs"]:
        largest = max(run["largest"].values(), default="equal bytes")
        seed = "default" if run["seed"] == "derandomized" else run["seed"]
        rows.append((run["op"], run["backend"], seed, number(run["examples"]), largest, run["date"]))
    total = defaultdict(int)
    for run in figures["runs"]:
        total[run["backend"]] += run["examples"]
    sums = "; ".join(f"{backend}: {number(count)}" for backend, count in total.items())
    header = ("operation", "backend", "seed", "examples", "largest share of the bound", "run on")
    return table(header, rows) + f"\n\nIn all, {sums}."


def memory(figures: dict) -> str:
    """Problems with every tensor flush against unmapped pages."""
    rows = [
        (where, number(run["problems"]), number(run.get("launches", run.get("runs", run["problems"]))), run["faults"])
        for where, run in figures["memory safety"]["runs"].items()
    ]
    return table(("where", "problems", "launches or runs", "faults"), rows)


def mutants(figures: dict) -> str:
    """Seeded faults by file, and those of the kernels' PTX."""
    by_file = defaultdict(list)
    for fault in figures["sources"]:
        by_file[fault["file"]].append(fault["verdict"] == "noticed")
    rows = [(name, len(found), sum(found), 0) for name, found in sorted(by_file.items())]
    rows.append(("**all of the sources**", len(figures["sources"]), sum(map(sum, by_file.values())), 0))
    programs = [
        (f"PTX of {program}", found["faults"], found["noticed"], len(found["harmless"]))
        for program, found in figures["kernels"].items()
    ]
    rows += [*programs, ("**all of the PTX**", *(sum(column) for column in list(zip(*programs))[1:]))]
    return table(("where", "seeded faults", "noticed", "harmless"), rows)


def found(figures: dict) -> str:
    rows = [(fault["what"], fault["where"], fault["kept"]) for fault in figures["faults"]]
    return table(("fault", "found by", "kept as"), rows)


def text() -> str:
    safety, property_runs, seeded = (
        load("2026-11-30-memory-safety.json"),
        load("2026-11-30-property.json"),
        load("mutation.json"),
    )
    graphs, unread, field = (
        safety["graphs"],
        safety["unread bytes"],
        safety["field cases on NVIDIA H200, aot and torch"],
    )
    replayed = graphs["NVIDIA H200"]
    drawn = [run for run in property_runs["runs"] if (run["backend"], run["seed"]) == ("torch", "derandomized")]
    one_run = sum(run["examples"] for run in drawn)
    return f"""# Reliability, in figures

Written by tools/reliability.py from [measurements](measurements); `--check` in the test suite compares. Each part can be
run again by the command beside it (V: a built CUDA variant).

## Properties

Random calls over the whole argument space of each operation, judged against float64 by an error bound stated for each dtype and
backend at the head of tests/property_bounds.py: `make property EXAMPLES=10000` on the CPU, one run of {number(one_run)} examples;
a few hundred in `make test`, the shipped programs in the emulator too, on sm_90, sm_100 or sm_103 as drawn (here
`{property_runs["emulated by"]}`); tests/gpu/test_property_gpu.py on a GPU.

{properties(property_runs)}

## Memory

Every tensor of every operation lies flush against unmapped pages, at its end and at its start, with any int32 in indices, tables
and lengths; a stray access ends the process: `{safety["memory safety"]["command"]}`.

{memory(safety)}

Bytes that may not be read hold NaN and change no bit of a result, and outputs start as NaN: `{unread["command"]}`
({", ".join(f"{where}: {count} tests" for where, count in unread["tests passed"].items())}).

## Graphs

`{graphs["command"]}`: {replayed["steps"]} operations captured at their largest, {replayed["changes of the inputs"]} changes of
lengths, pages and selections between replays, {number(replayed["replays compared with the first"])} replays compared with the first
bit for bit, two graphs on two streams, workspaces while the allocator is emptied. H200, {replayed["tests passed"]} tests.

## Determinism

What changes the bits of a result, operation by operation: the table in [README](../README.md#what-changes-a-results-bits), made of the structure
that tests/test_determinism.py, tests/test_emulated_determinism.py and tests/gpu/test_determinism_gpu.py check.

## Field bugs

Failures that users of other kernels of this model met, each a named test: tests/test_field_cases.py, and on a GPU
`{field["command"]}` ({field["tests passed"]} tests on an H200).

## Do the tests notice?

Faults seeded one at a time: `make mutants`. In the sources, the kernels' among them, faults of what is computed; in the kernels' PTX
those of how threads work together. What is harmless has its reason in [mutation.md](mutation.md).

{mutants(seeded)}

## Faults found on the way

{found(load("faults-found.json"))}

## Static

`make lint`: ruff, mypy --strict of the package, clang-format, g++ and clang++ with -Wall -Wextra -Werror, clang-tidy of the launcher.
`make fuzz`: libFuzzer over the operators' argument checks and launches. [checks.md](checks.md) has the figures.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, fail if the document isn't up to date")
    if parser.parse_args().check:
        current = DOCUMENT.read_text() == text()
        print(f"{DOCUMENT.name}: {'up to date' if current else 'not what the figures say'}")
        return 0 if current else 1
    DOCUMENT.write_text(text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
