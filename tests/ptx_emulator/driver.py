"""A CUDA driver whose device is the emulator: what the extension's launcher packed is executed.

    driver = EmulatingDriver(folder, build/kernels)
    with driver.tensors(q, out=out): torch.ops.<namespace>.aot_...(...)

Device memory is host memory. A launch may touch only the tensors given, and write only outputs.
"""

import contextlib
import ctypes
import json
from pathlib import Path

from recording_driver import RecordingDriver

from . import launch as emulator


class EmulatingDriver(RecordingDriver):
    """`policy` and the capability that the device claims (`set_capability`) may be changed between launches."""

    def __init__(self, folder, kernels, policy="eager"):
        self.kernels = Path(kernels)
        index = json.loads((self.kernels / "index.json").read_text())
        super().__init__(folder, {facts["entry"]: facts for facts in index})
        self.policy = policy
        self.memory, self.results, self.error = [], [], None
        self.programs = {}  # entry -> Program, of everything launched
        self.most_ctas = {}  # entry -> CTAs of a launch, of programs that take any number: few have many tiles each
        self.edit = None  # changes the PTX before it is encoded, for tests of broken programs

    @contextlib.contextmanager
    def tensors(self, *inputs, outputs=()):
        """The global memory of the launches inside."""
        before = list(self.memory)
        self.memory += [emulator.memory_of(t, False) for t in inputs if t is not None]
        self.memory += [emulator.memory_of(t, True) for t in outputs if t is not None]
        try:
            yield self
        finally:
            self.memory = before

    def program(self, entry):
        text = (self.kernels / f"{self.manifests[entry]['name']}.ptx").read_text()
        if self.edit is not None:
            text = self.edit(text)
        program = emulator.load(text, entry)
        self.programs[entry] = program
        return program

    def _on_launch(self, entry, grid, block, shared_bytes, stream, params):
        try:
            program = self.program(entry.decode())
            manifest = self.manifests[program.entry.name]
            if len(manifest["params"]) != len(program.entry.params):
                raise ValueError(f"{program.entry.name}: manifest and PTX differ in their parameters")
            values = [ctypes.string_at(params[i], p["size"]) for i, p in enumerate(manifest["params"])]
            self.results.append(
                emulator.launch(
                    program,
                    None,
                    (min(grid[0], self.most_ctas.get(program.entry.name, grid[0])), grid[1], grid[2]),
                    tuple(block[:3]),
                    shared_bytes,
                    emulator.pack(program, values),
                    (self.last_cluster, 1, 1),
                    memory=self.memory,
                    policy=self.policy,
                )
            )
            return 0
        except Exception as error:  # noqa: BLE001  a callback from C can't raise
            self.error = error
            return 719  # CUDA_ERROR_LAUNCH_FAILED

    def raise_error(self):
        error, self.error = self.error, None
        if error is not None:
            raise error
