"""`pytest --backend=emulated`: the public functions run the shipped programs in the emulator, on CPU tensors.

The product is untouched: its launcher takes CPU tensors when the driver says that its memory is the host's, and here
the driver is EmulatingDriver. Patched are only the package's idea of the CPU's architecture and the way to its
operators.
"""

import contextlib
import sys
import warnings

import torch

from . import coverage
from .driver import EmulatingDriver


class Emulation:
    """The driver, and the record of what ran. The CPU passes for a device of `architecture` ("sm_90")."""

    def __init__(self, folder, kernels, architecture="sm_90"):
        self.driver = EmulatingDriver(folder, kernels)
        self.become(architecture)
        self.calling, self.fill = False, 0xFF
        self.reports = []
        self.library = torch.library.Library("aten", "IMPL")
        self.library.impl("new_empty", self.new_empty, "CPU")

    def new_empty(self, tensor, size, dtype=None, layout=None, device=None, pin_memory=None):
        """What an operator allocates is memory of the launches that follow, full of `fill`: NaN, as a rule."""
        made = torch.empty(size, dtype=dtype or tensor.dtype, device=device or tensor.device)
        if self.calling:
            made.untyped_storage().copy_(
                torch.full((made.untyped_storage().nbytes(),), self.fill, dtype=torch.uint8).untyped_storage()
            )
            self.driver.memory.append((made.data_ptr(), made.numel() * made.element_size(), True))
        return made

    def become(self, architecture):
        self.architecture = architecture
        self.driver.set_capability(int(architecture[len("sm_") :]))

    @contextlib.contextmanager
    def device(self, architecture, multiprocessors=0):
        """Pass for another device: the launcher picks its images, the package its rows of the capability table. With few
        multiprocessors a persistent CTA gets much to do in a small problem."""
        before = self.architecture
        self.become(architecture)
        self.driver.set_multiprocessors(multiprocessors)
        try:
            yield self
        finally:
            self.become(before)
            self.driver.set_multiprocessors(0)

    def install(self, package):
        """Make the package's `aot` operators run here."""
        for name, module in list(sys.modules.items()):
            if name.startswith(package.__name__) and hasattr(module, "architecture"):
                module.architecture = lambda device: self.architecture
        for key, function in list(package.ops.BUILT.items()):
            if key[1] == "aot":
                package.ops.BUILT[key] = self.wrapped(function)

    def wrapped(self, function, schema=None):
        """The operator with its tensors given to the driver: only arguments that its schema marks are written."""
        schema = schema or function._schema
        named = {a.name: a for a in schema.arguments}

        def call(*args, **options):
            given = list(zip(schema.arguments, args)) + [(named[name], value) for name, value in options.items()]
            tensors = [(a, value) for a, value in given if isinstance(value, torch.Tensor)]
            written = [a.alias_info is not None and a.alias_info.is_write for a, _ in tensors]
            inputs = [value for (_, value), w in zip(tensors, written) if not w]
            outputs = [value for (_, value), w in zip(tensors, written) if w]
            driver, before = self.driver, len(self.driver.results)
            self.calling = True
            try:
                with driver.tensors(*inputs, outputs=outputs):
                    return function(*args, **options)
            except RuntimeError:
                driver.raise_error()
                raise
            finally:
                self.calling = False
                self.reports += [r for result in driver.results[before:] for r in result.reports]

        return call

    @contextlib.contextmanager
    def dispatched(self, package):
        """The operators themselves, called through torch's dispatcher by whoever has them, run here: for opcheck and
        torch.compile, which don't look into the package's table."""
        prefix = f"{package.ops.ops.name}::aot_"
        names = [name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith(prefix)]
        operators = {name: getattr(package.ops.ops, name).default for name in names}
        before, library = dict(package.ops.BUILT), torch.library.Library(package.ops.ops.name, "IMPL")
        for name, operator in operators.items():
            kernel = torch._C._dispatch_get_computed_kernel_for_dispatch_key(operator.name(), "CPU")

            def run(keyset, *args, kernel=kernel, operator=operator, **options):
                return self.wrapped(lambda *a, **o: kernel.call_boxed(keyset, *a, **o), operator._schema)(
                    *args, **options
                )

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that a kernel is replaced
                library.impl(name, run, "CPU", with_keyset=True)
        package.ops.BUILT.update({key: operators[f"aot_{key[0]}"] for key in before if key[1] == "aot"})
        try:
            yield operators
        finally:
            package.ops.BUILT.update(before)
            library._destroy()

    @contextlib.contextmanager
    def policy(self, text):
        """Run under another policy, with no report allowed."""
        before, self.driver.policy, self.reports = self.driver.policy, text, []
        try:
            yield self
            assert not self.reports, "\n".join(self.reports)
        finally:
            self.driver.policy = before

    def unexecuted(self, kernel):
        """Blocks of a kernel's launched programs that never ran: {entry: [(first PTX line, its text)]}.

        Not counted: the jump back to an mbarrier wait, which is taken only if the wait gives up.
        """
        entries = [e for e in self.driver.programs if self.driver.manifests[e]["kernel"] == kernel]
        found = {entry: coverage.missing(self.driver.programs[entry])[0] for entry in entries}
        return {entry: blocks for entry, blocks in found.items() if blocks}

    def check_coverage(self, kernel, positive=(), reasons=(), arch="sm_90a"):
        """Every program of a kernel was launched, and every block of it ran that can (coverage.missing)."""
        facts = self.driver.manifests
        entries = [e for e in facts if facts[e]["kernel"] == kernel and facts[e]["arch"] == arch]
        idle = set(entries) - self.driver.programs.keys()
        assert entries and not idle, f"not launched: {sorted(idle)}"
        found = {entry: coverage.missing(self.driver.programs[entry], positive, reasons) for entry in entries}
        left = {entry: blocks for entry, (blocks, _) in found.items() if blocks}
        assert not left, left
        programs = {e: (len(self.driver.programs[e].blocks), why) for e, (_, why) in found.items()}
        coverage.record(f"{kernel}-{arch}", programs)
