"""How many examples the property tests draw, from which seed, and where their figures go: set by conftest.py's options.

By default a few hundred, the same in every run. `--examples N` spreads N over the operations; `--property-seed S` draws
others, reproducibly. A failure says both, and hypothesis prints the smallest failing example and how to repeat it.
"""

import functools
import json
import sys
import time
from pathlib import Path

# The default number for each operation: (torch on the CPU, emulated); a GPU takes the first.
DEFAULT = {
    "sparse_attention": (110, 30),
    "dense_attention": (60, 16),
    "block_scores": (40, 12),
    "select_blocks": (60, 16),
    "store_kv": (40, 8),
    "merge_states": (50, 8),
}


class _Chosen:
    examples = None  # of all operations together
    seed = None
    figures = None  # folder
    shrink = True


def configure(examples, seed, figures, as_drawn):
    _Chosen.examples, _Chosen.seed, _Chosen.shrink = examples, seed, not as_drawn
    _Chosen.figures = Path(figures) if figures else None


def number(op, backend):
    column = 1 if backend == "emulated" else 0
    if _Chosen.examples is None:
        return DEFAULT[op][column]
    whole = sum(numbers[column] for numbers in DEFAULT.values())
    return max(1, -(-_Chosen.examples * DEFAULT[op][column] // whole))


def examples(op, backend):
    """The decorator of a property test of `op`: goes above hypothesis.given."""
    import hypothesis

    phases = [
        p for p in hypothesis.Phase if _Chosen.shrink or p not in (hypothesis.Phase.shrink, hypothesis.Phase.explain)
    ]
    settings = hypothesis.settings(
        max_examples=number(op, backend), deadline=None, derandomize=_Chosen.seed is None, database=None, print_blob=True,
        phases=phases, suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip

    def decorate(test):
        drawn = settings(test) if _Chosen.seed is None else hypothesis.seed(_Chosen.seed)(settings(test))

        @functools.wraps(test)
        def run(*args, **kwargs):
            started = _progress[op, backend] = time.monotonic()
            try:
                drawn(*args, **kwargs)
            except BaseException:
                given = f"--examples {_Chosen.examples}" if _Chosen.examples else "the default number of examples"
                seed = "derandomized" if _Chosen.seed is None else f"--property-seed {_Chosen.seed}"
                print(f"{op} on {backend}: repeat with {given}, {seed}")
                raise
            record(op, backend, time.monotonic() - started)

        # pytest takes fixtures from the signature that hypothesis left.
        run.__wrapped__ = drawn
        return run

    return decorate


# ------------------------------------------------------------------------------------------------------------- figures

_progress = {}  # (op, backend) -> when it began
# (op, backend) -> [calls, checked results, {what: (largest ratio to the bound, of what draw)}]
_seen = {}


def count(op, backend, calls=0, examples=0):
    entry = _seen.setdefault((op, backend), {"examples": 0, "calls": 0, "largest": {}})
    entry["calls"] += calls
    entry["examples"] += examples
    wanted = number(op, backend)
    if wanted >= 1000 and entry["examples"] % (wanted // 10) == 0 and (op, backend) in _progress:
        seconds = time.monotonic() - _progress[op, backend]
        print(f"{op} on {backend}: {entry['examples']} of {wanted} examples, {seconds:.0f} s", file=sys.stderr)


def ratio(op, backend, what, value):
    largest = _seen.setdefault((op, backend), {"examples": 0, "calls": 0, "largest": {}})["largest"]
    largest[what] = max(largest.get(what, 0.0), float(value))


def record(op, backend, seconds):
    """Print the figures of an operation, and keep them where a folder was given. A worker's standard output is lost, its
    standard error isn't."""
    entry = _seen.get((op, backend))
    if entry is None:
        return
    ratios = ", ".join(f"{what} {value:.3f}" for what, value in sorted(entry["largest"].items()))
    print(
        f"{op} on {backend}: {entry['examples']} examples, {entry['calls']} calls, {seconds:.0f} s; largest share of the "
        f"bound: {ratios or 'equal bytes'}",
        file=sys.stderr,
    )
    if _Chosen.figures:
        _Chosen.figures.mkdir(parents=True, exist_ok=True)
        seed = "derandomized" if _Chosen.seed is None else _Chosen.seed
        facts = {"op": op, "backend": backend, "seed": seed, "seconds": round(seconds, 1), **entry}
        name = f"{backend.replace(chr(32), chr(45))}-{op}-{seed}.json"
        (_Chosen.figures / name).write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n")
