"""What runs where, as data, and the choice of a backend from it.

Every refusal is a sentence; `explain` prints them all. Nothing falls back silently: the default rule is fixed (`aot`
where a row of the table allows it and the build contains it, else `torch`), and a backend asked for by name either runs
or raises.
"""

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch

from . import _contiguous, _jit, _limits, checks
from ._architecture import architecture
from ._arguments import needs_grad as any_needs_grad
from .ops import BUILT, OPERATIONS

BACKENDS = ("torch", "aot", "jit")
TESTED = "tested on CPU"
MEASURED = "measured on H200, 2026-12-01"
EMULATED = "compiled, emulated, not yet run on hardware"  # docs/ptx_emulator.md says what that proves
JIT = "compiled by nvidia-cutlass-dsl where it runs"
JIT_MEASURED = f"{JIT}; bits of aot on H200, 2026-12-01"
JIT_UNTRIED = f"{JIT}; not yet run"


# Where an error sends its reader.
HELP = 'explain("{0}", ...) says what each backend makes of such a call, capabilities() lists what runs where'


@dataclass(frozen=True)
class Capability:
    """One row: `arch` is "any" or a CUDA architecture, `dtypes` the combinations "query+cache" (merge_states:
    "in>out").
    """

    op: str
    backend: str
    arch: str
    dtypes: tuple[str, ...]
    status: str


def aligned(rows: Sequence[tuple[str, ...]]) -> str:
    """A text table: columns two spaces apart, as wide as their longest cell; the last one may have several lines."""
    width = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    lines = []
    for *cells, last in rows:
        begin = "".join(cell.ljust(n + 2) for cell, n in zip(cells, width))
        first, *more = last.split("\n")
        lines += [(begin + first).rstrip(), *(" " * len(begin) + line for line in more)]
    return "\n".join(lines)


class CapabilityTable(list[Capability]):
    """A list of rows that prints as a text table, or as Markdown with equal rows merged."""

    header = ("operation", "backend", "runs on", "dtypes", "status")

    def cells(self) -> list[tuple[str, ...]]:
        return [(r.op, r.backend, r.arch, ", ".join(r.dtypes) or "-", r.status) for r in self]

    def __str__(self) -> str:
        return aligned([self.header, *self.cells()])

    def merged(self) -> list[tuple[str, ...]]:
        """The cells with what is equal put together: a row for all operations and architectures that share the rest."""
        operations: dict[tuple[str, ...], list[str]] = {}
        for op, *others in self.cells():
            operations.setdefault(tuple(others), []).append(op)
        architectures: dict[tuple[str, ...], list[str]] = {}
        for (name, arch, dtypes, status), ops in operations.items():
            architectures.setdefault((", ".join(ops), name, dtypes, status), []).append(arch)
        return [(ops, name, ", ".join(archs), *rest) for (ops, name, *rest), archs in architectures.items()]

    def markdown(self) -> str:
        lines = ["| " + " | ".join(row) + " |" for row in [self.header, ("---",) * len(self.header), *self.merged()]]
        return "\n".join(lines)


_PLAIN = ("bf16", "fp16", "fp32")
_ATTENTION = tuple(f"{x}+{x}" for x in _PLAIN) + tuple(f"{x}+{y}" for x in _PLAIN for y in ("e4m3", "e5m2"))
_SCORING = _ATTENTION + ("e4m3+e4m3",)
_STORE = _ATTENTION + ("e4m3+e4m3", "e5m2+e5m2")
_MERGE = tuple(f"{x}>{y}" for x in _PLAIN for y in _PLAIN)
_TORCH = {
    "block_scores": _SCORING,
    "select_blocks": _SCORING,
    "sparse_attention": _ATTENTION,
    "dense_attention": _ATTENTION,
    "store_kv": _STORE,
    "merge_states": _MERGE,
}
_KERNEL_FLOATS = ("bf16", "fp16")
_SAME = tuple(f"{x}+{x}" for x in _KERNEL_FLOATS)
_AOT = {
    "block_scores": _SAME + tuple(f"{x}+e4m3" for x in (*_KERNEL_FLOATS, "e4m3")),
    "select_blocks": _SAME + tuple(f"{x}+e4m3" for x in (*_KERNEL_FLOATS, "e4m3")),
    "sparse_attention": _SAME + tuple(f"{x}+{y}" for x in _KERNEL_FLOATS for y in ("e4m3", "e5m2")),
    "dense_attention": _SAME,
    "store_kv": _STORE,
    "merge_states": ("bf16>bf16", "fp16>fp16", "fp32>fp32", "fp32>bf16", "fp32>fp16"),
}
_ARCHITECTURES = {"sm_90": MEASURED, "sm_100": EMULATED, "sm_103": EMULATED}


TABLE = CapabilityTable(
    [Capability(op, "torch", "any", dtypes, TESTED) for op, dtypes in _TORCH.items()]
    + [
        Capability(op, "aot", arch, pairs, status)
        for op, pairs in _AOT.items()
        for arch, status in _ARCHITECTURES.items()
    ]
    + [
        Capability(op, "jit", arch, pairs, JIT_MEASURED if arch == "sm_90" else JIT_UNTRIED)
        for op, pairs in _AOT.items()
        for arch in _ARCHITECTURES
    ]
)

_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}

# What the table allows, in the form that a call asks for: (op, backend, arch, dtypes).
_ALLOWED = frozenset((r.op, r.backend, r.arch, pair) for r in TABLE for pair in r.dtypes)

# The one environment override, read here and nowhere else. Its value is judged by the first call, so that an import
# never fails for it.
_environment: Optional[str] = os.environ.get("M3_SPARSE_BACKEND") or None
_forced = _environment
# The contexts that are open, by number, in the order of their beginning; the last one rules. Threads may close them in
# any order.
_open: dict[int, Optional[str]] = {}
_numbers = itertools.count()


class _Forced:
    def __init__(self, name: Optional[str]):
        self.name = name
        self.mine: list[int] = []  # a context may be entered again before it is left

    def __enter__(self) -> None:
        global _forced
        self.mine.append(next(_numbers))
        _open[self.mine[-1]] = _forced = self.name

    def __exit__(self, *error: object) -> None:
        global _forced
        del _open[self.mine.pop()]
        _forced = [_environment, *_open.values()][-1]


def backend(name: Optional[str]) -> _Forced:
    """Context manager: every call inside runs on backend `name` or raises.

    `name` is "torch", "aot" or "jit"; None restores the default rule. The setting belongs to the process, not to the
    thread: of the contexts open anywhere, the one opened last rules. The environment variable M3_SPARSE_BACKEND sets it
    for a whole run.

    Raises:
        ValueError: the name is not one of the three (or None).
    """
    if name is not None and name not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)} or None, got {name!r}")
    return _Forced(name)


def capabilities() -> CapabilityTable:
    """The table of what runs where: a list of rows with a readable `str()` and a `markdown()` method."""
    return CapabilityTable(TABLE)


def dtype_key(op: str, first: torch.dtype, second: torch.dtype) -> str:
    joint = ">" if op == "merge_states" else "+"
    return _NAMES.get(first, str(first)) + joint + _NAMES.get(second, str(second))


def refusals(op: str, name: str, device: torch.device, dtypes: str, needs_grad: bool) -> list[str]:
    """Every reason why backend `name` cannot run this call; empty if it can. Depends on table and build only."""
    live = [row for row in TABLE if row.op == op and row.backend == name]
    reasons = []
    unmet = _jit.missing(op) if name == "jit" else None
    if unmet is not None:
        reasons.append(unmet)
    elif (op, name) not in BUILT:
        reasons.append(
            f"this build of m3_sparse contains no {name} kernels (it is a build without a compiled extension)"
        )
    if name != "torch":
        arch = architecture(device)
        if arch not in [row.arch for row in live]:
            reasons.append(f"{op} on {name} runs on {', '.join([row.arch for row in live])}; the tensors are on {arch}")
        if needs_grad:
            reasons.append(f"{op} on {name} has no backward pass, and an input requires grad")
    if dtypes not in live[0].dtypes:
        reasons.append(f"{op} on {name} takes dtypes {', '.join(live[0].dtypes)}; got {dtypes}")
    return reasons


def choose(
    op: str,
    device: torch.device,
    first: torch.dtype,
    second: torch.dtype,
    needs_grad: bool = False,
    outside_aot: Optional[str] = None,
) -> str:
    """The backend of this call; NotImplementedError with every reason if the one asked for by name cannot run it.

    `outside_aot`: the sentence of `_limits` where the shapes are none that the ahead-of-time kernels take.
    """
    dtypes = dtype_key(op, first, second)
    if _forced is None:
        # The two common answers without building reasons: this runs at every call.
        aot = not needs_grad and outside_aot is None and (op, "aot") in BUILT
        if aot and (op, "aot", architecture(device), dtypes) in _ALLOWED:
            return "aot"
        if (op, "torch", "any", dtypes) in _ALLOWED:
            return "torch"
        reasons = refusals(op, "torch", device, dtypes, needs_grad)
        raise NotImplementedError("; ".join([*reasons, HELP.format(op)]))
    if _forced not in BACKENDS:
        raise ValueError(f"M3_SPARSE_BACKEND must be one of {', '.join(BACKENDS)}, got {_forced!r}")
    reasons = refusals(op, _forced, device, dtypes, needs_grad)
    if _forced != "torch" and outside_aot is not None:
        reasons.append(outside_aot)
    if reasons:
        if _forced != "torch" and not refusals(op, "torch", device, dtypes, needs_grad):
            reasons.append("torch can run it: name no backend, or backend('torch')")
        raise NotImplementedError(
            f"backend {_forced!r} was asked for by name and cannot run this call: "
            + "; ".join([*reasons, HELP.format(op)])
        )
    return _forced


def _operands(op: str, given: dict[str, Any]) -> Optional[tuple[torch.Tensor, torch.dtype]]:
    """The tensor that names the device and first dtype of a call, and the second dtype."""
    first_name, second_name = {
        "block_scores": ("index_q", "index_k_cache"),
        "select_blocks": ("index_q", "index_k_cache"),
        "sparse_attention": ("q", "k_cache"),
        "dense_attention": ("q", "k_cache"),
        "store_kv": ("k", "k_cache"),
        "merge_states": ("outs", "outs"),
    }[op]
    first, second = given.get(first_name), given.get(second_name)
    if op == "merge_states" and isinstance(first, (list, tuple)) and first and isinstance(first[0], torch.Tensor):
        first = second = first[0]
    if not isinstance(first, torch.Tensor):
        return None
    dtype = second.dtype if isinstance(second, torch.Tensor) else first.dtype
    return first, given.get("out_dtype") or dtype


def _overview() -> str:
    """What runs on this machine by default, operation by operation."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    arch, rows = architecture(device), [("operation", "by default", "dtypes")]
    for op in OPERATIONS:
        aot = [r for r in TABLE if (r.op, r.backend, r.arch) == (op, "aot", arch) and (op, "aot") in BUILT]
        taken = {pair for row in aot for pair in row.dtypes}
        rows += [(op, "aot", ", ".join(row.dtypes)) for row in aot]
        rest = [pair for row in TABLE if (row.op, row.backend) == (op, "torch") for pair in row.dtypes]
        rows.append(("" if aot else op, "torch", ", ".join(pair for pair in rest if pair not in taken) or "-"))
    return (
        f"m3_sparse on {arch}, torch {torch.__version__}\n\n{aligned(rows)}\n\n"
        'explain("sparse_attention", q=q, k_cache=k_cache, ...) says it for a call, with every reason; capabilities() lists\n'
        'what runs where and what was measured; with backend("aot"): a call runs there or raises.'
    )


def explain(op: Optional[str] = None, **arguments: Any) -> str:
    """Why a call of `op` with these arguments would take which backend, or why it can't.

    Args:
        op: the name of a public function, such as "sparse_attention". None: what runs on this machine by default.
        arguments: that function's arguments by name. With all of them the argument checks run too; with only the
            tensors that matter (q and k_cache, index_q and index_k_cache, k and k_cache, or outs) the choice alone is
            explained; with none, the rows of the table are listed.

    Returns:
        A table as text, for print(). Nothing is launched.

    Raises:
        ValueError: there is no such operation.
    """
    if op is None:
        return _overview()
    if op not in OPERATIONS:
        raise ValueError(f"op must be one of {', '.join(OPERATIONS)}, got {op!r}")
    operands = _operands(op, arguments)
    if operands is None:
        return f"{op}:\n" + str(CapabilityTable([row for row in TABLE if row.op == op]))
    first, second = operands
    needs_grad = any_needs_grad(*[x for x in arguments.values() if isinstance(x, torch.Tensor)])
    dtypes = dtype_key(op, first.dtype, second)
    lines = [
        f"{op} with dtypes {dtypes} on {architecture(first.device)}"
        + (", gradients needed" if needs_grad else "")
        + ":"
    ]
    problem = checks.problem(op, arguments)
    known = _limits.well_formed(arguments)
    paged = known if problem else _contiguous.paged_arguments(op, known)
    outside = _limits.outside_aot(op, paged)
    rows = [("backend", "runs", "why not")]
    for name in BACKENDS:
        reasons = refusals(op, name, first.device, dtypes, needs_grad)
        if name != "torch" and outside is not None:
            reasons.append(outside)
        rows.append((name, "no" if reasons else "yes", "\n".join(reasons)))
    lines.append(aligned(rows))
    try:
        rule = "by default" if _forced is None else "asked for by name"
        chosen = choose(op, first.device, first.dtype, second, needs_grad, outside)
        lines.append(f"-> {chosen}, {rule}")
        if op == "sparse_attention" and chosen != "torch" and not problem:
            formulation = _limits.explain_plan(paged)
            lines += [] if formulation is None else [f"   formulation: {formulation}"]
    except (ValueError, NotImplementedError) as error:
        lines.append(f"-> raises {type(error).__name__}: {error}")
    if problem:
        lines.append(f"bad input: {problem}")
    return "\n".join(lines)
