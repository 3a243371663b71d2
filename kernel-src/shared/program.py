"""What a kernel file offers to the exporter: its `programs()` returns a list of these."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Program:
    """One kernel variant.

    `kernel` has a `@cute.kernel` method `kernel`, a `@cute.jit` method `entry` that launches it, and `dynamic_smem`, the
    bytes of dynamic shared memory of that launch: no compiler output holds this number, so the kernel must.
    `example` are arguments for `entry` without the stream; only their types count.
    """

    name: str
    kernel: object
    example: list
