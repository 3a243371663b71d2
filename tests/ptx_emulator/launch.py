"""Launching a program: `launch(ptx_text, entry, grid, block, smem, params)`."""

import ctypes
import functools
import struct
from dataclasses import dataclass, field

import numpy as np

from . import core
from .parser import parse
from .program import Program


class EmulatorError(RuntimeError):
    """A program did what hardware forbids; the text names CTA, warp and PTX line."""


class DeadlockError(EmulatorError):
    """No warp can go on; the text says what each one waits for."""


@dataclass
class Result:
    reports: list = field(default_factory=list)  # races and missing proxy fences
    instructions: int = 0  # of warps
    matrix_instructions: int = 0
    ctas: int = 0


@dataclass
class Policy:
    """When asynchronous operations complete and warps run.

    mode: "eager" completes them at issue; "late" as late as possible (all of them, or the kinds in `starved`, names of
    core.ASYNC_KINDS); "random" draws everything from `seed`. `race` adds the happens-before checks.
    """

    mode: str = "eager"
    starved: tuple = core.ASYNC_KINDS
    seed: int = 0
    race: bool = False
    max_resident: int = 132  # CTAs that run at once
    max_instructions: int = 10**10

    @classmethod
    def parse(cls, text):
        """From "eager", "late", "late:wgmma", "random3", each with an optional "+race"."""
        mode, _, race = text.partition("+")
        if race not in ("", "race"):
            raise ValueError(f"policy {text!r}")
        starved = core.ASYNC_KINDS
        if mode.startswith("late:"):
            mode, starved = "late", (mode[5:],)
        if mode.startswith("random"):
            return cls("random", seed=int(mode[6:] or 0), race=bool(race))
        if mode not in ("eager", "late") or set(starved) - set(core.ASYNC_KINDS):
            raise ValueError(f"policy {text!r}")
        return cls(mode, starved, race=bool(race))


@functools.lru_cache(maxsize=64)
def load(text, entry):
    """The encoded program of one entry of a PTX file; kept, because tests launch few programs often."""
    module = parse(text)
    if entry is None:
        [entry] = module.entries
    if entry not in module.entries:
        raise ValueError(f"no entry {entry} in this PTX; it has {', '.join(module.entries)}")
    return Program(module, module.entries[entry])


def pack(program, values):
    """The parameter block from one value a parameter: an int, a float, a pointer, a numpy array or bytes."""
    offsets, size = program.entry.param_offsets()
    if len(values) != len(offsets):
        raise ValueError(f"{program.entry.name} has {len(offsets)} parameters, {len(values)} were given")
    block = bytearray(size)
    for i, (value, offset, (_, width, _)) in enumerate(zip(values, offsets, program.entry.params)):
        if isinstance(value, (bytes, bytearray)):
            data = bytes(value)
        elif isinstance(value, float):
            data = struct.pack("<f", value)
        elif isinstance(value, (int, np.integer)):
            data = (int(value) & (1 << 8 * width) - 1).to_bytes(width, "little")
        elif isinstance(value, np.ndarray):
            data = struct.pack("<Q", value.ctypes.data)
        elif hasattr(value, "data_ptr"):
            data = struct.pack("<Q", value.data_ptr())
        else:
            raise TypeError(f"parameter {i}: {type(value).__name__}")
        if len(data) != width:
            raise ValueError(f"parameter {i} of {program.entry.name} has {width} bytes, {len(data)} were given")
        block[offset : offset + width] = data
    return bytes(block)


def memory_of(tensor, writable=True):
    """(base, size, writable) of the bytes that a numpy array or torch tensor spans."""
    if isinstance(tensor, tuple):
        return tensor if len(tensor) == 3 else (*tensor, writable)
    if isinstance(tensor, np.ndarray):
        low, high = np.lib.array_utils.byte_bounds(tensor) if hasattr(np.lib, "array_utils") else np.byte_bounds(tensor)
        return low, high - low, writable
    if tensor.numel() == 0:
        return tensor.data_ptr(), 0, writable
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr(), (last + 1) * tensor.element_size(), writable


def launch(ptx, entry, grid, block, smem, params, cluster=(1, 1, 1), memory=None, read_only=(), policy="eager"):
    """Run one entry of a PTX text to its end and return a Result.

    params: one value a parameter (see `pack`), or the packed block as bytes. Tensors among them, those in `memory` and
    those in `read_only` are the only global memory there is; each may also be (address, bytes). Raises EmulatorError or
    DeadlockError; Result.reports has what the checks found.
    """
    program = ptx if isinstance(ptx, Program) else load(ptx, entry)
    if isinstance(policy, str):
        policy = Policy.parse(policy)
    ranges = [memory_of(t) for t in memory or ()] + [memory_of(t, False) for t in read_only]
    if not isinstance(params, (bytes, bytearray)):
        ranges += [memory_of(v) for v in params if isinstance(v, np.ndarray) or hasattr(v, "data_ptr")]
        params = pack(program, params)
    elif len(params) != program.param_bytes:
        raise ValueError(f"{program.entry.name} takes {program.param_bytes} bytes of parameters, got {len(params)}")
    three = lambda x: tuple(x) + (1,) * (3 - len(tuple(x))) if not isinstance(x, int) else (x, 1, 1)
    grid, block, cluster = three(grid), three(block), three(cluster)
    threads = program.entry.threads
    if threads and threads != block:
        raise ValueError(f"{program.entry.name} is compiled for {threads} threads a CTA, launched with {block}")
    table = np.array([r for r in ranges if r[1]], core.RANGE)
    data = ctypes.create_string_buffer(bytes(params), max(len(params), 1))
    spec = core.LaunchSpec(
        (ctypes.c_uint32 * 3)(*grid), (ctypes.c_uint32 * 3)(*block), (ctypes.c_uint32 * 3)(*cluster), smem,
        ctypes.addressof(data), len(params), table.ctypes.data, len(table),
        ("eager", "late", "random").index(policy.mode), sum(1 << core.ASYNC_KINDS.index(k) for k in policy.starved),
        policy.seed, policy.race, policy.max_resident, policy.max_instructions,
    )  # fmt: skip
    status, text = program.core.launch(spec)
    if status:
        raise (DeadlockError if status == 2 else EmulatorError)(f"{program.entry.name}: {text}")
    return Result(text.splitlines(), spec.instructions, spec.matrix_instructions, spec.ctas)
