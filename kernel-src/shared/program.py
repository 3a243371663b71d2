"""What a kernel file offers to the exporter: its `programs()` returns a list of `Program`s, each with a `Kernel`."""

import inspect
from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

from shared import tma

EXAMPLES = {Int64: Int64(16), Int32: Int32(1), Float32: Float32(1.0)}


class Kernel:
    """Base of every kernel class, which adds a `@cute.kernel` method `kernel` and `threads`, a CTA's.

    The parameters of `kernel`, each with its type as annotation, are what the C++ launcher packs: tensor maps
    (cute.CopyAtom), then the types of EXAMPLES. What is said of the launch here is only what decides the code; the grid
    is the launcher's alone.
    """

    dynamic_smem = 0  # bytes; no compiler output holds this number
    ctas_per_sm = 0  # that must fit side by side, which bounds the registers of a thread; 0: no bound
    cluster = 1  # CTAs

    @cute.jit
    def entry(self, stream: cuda.CUstream, *arguments):
        """A launch, for the compiler to compile; nothing runs it."""
        maps = [tma.example_map(BFloat16) for kind in self.parameter_types() if kind is cute.CopyAtom]
        self.kernel(*maps, *arguments).launch(
            grid=[self.cluster, 1, 1],
            block=[self.threads, 1, 1],
            cluster=[self.cluster, 1, 1] if self.cluster > 1 else None,
            smem=self.dynamic_smem,
            min_blocks_per_mp=self.ctas_per_sm,
            preferred_smem_carveout=0,  # the launcher's too; where nothing is said the DSL asks a GPU
            stream=stream,
        )

    def parameter_types(self):
        return [parameter.annotation for parameter in inspect.signature(self.kernel).parameters.values()]

    def examples(self):
        """Arguments of `entry` behind the stream; only their types count."""
        return [EXAMPLES[kind] for kind in self.parameter_types() if kind is not cute.CopyAtom]


@dataclass(frozen=True)
class Program:
    """One kernel variant."""

    name: str
    kernel: Kernel
