"""Emulator against GPU: the same calls of the shipped programs, compared bit for bit.

    python tests/ptx_emulator/agreement.py both --variant build/torch-stable-abi...           (on a GPU)

or in two parts, because the emulator needs no GPU and the GPU's machine no compiler:

    python tests/ptx_emulator/agreement.py record --file FILE --variant build/torch-stable-abi...
    python tests/ptx_emulator/agreement.py compare --file FILE --variant build/torch-stable-abi...

`record` runs the calls of agreement_calls.py in the emulator and writes arguments, results and the programs launched;
it fails unless every SM90 program was. `--device sm_100` takes the programs of that card instead, and only says which
were not. `compare` repeats the calls on the GPU and prints, for each kind of call and output
and for each program, how many elements differ and by how many ulps at most. It fails if anything differs in a bit where
the arithmetic is exact, or by more than stated here where it isn't.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

TESTS = Path(__file__).resolve().parents[1]
# By the kind of data (agreement_calls.py): most ulps of the output's dtype, at the largest of its row; none where it is
# exact. Not exact are ex2, lg2 and rcp (float.cpp), and the order and width of sums in a matrix instruction (mma.cpp).
ALLOWED_ULPS = {
    "dyadic": {torch.bfloat16: 1, torch.float16: 1, torch.float32: 4},
    "normal": {torch.bfloat16: 1, torch.float16: 1, torch.float32: 16},
}
FP8_QUERIES = {torch.float32: 2**13}  # the fp8 MMA adds with fewer bits than float32 has


def load_package(variant):
    spec = importlib.util.spec_from_file_location(
        "m3_sparse", Path(variant) / "__init__.py", submodule_search_locations=[str(variant)]
    )
    sys.modules["m3_sparse"] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    return package


def operator(package, name):
    return getattr(getattr(package.ops, "ops", package.ops), f"aot_{name}").default


def written(function):
    """Positions of the arguments that an operator writes."""
    return [i for i, a in enumerate(function._schema.arguments) if a.alias_info is not None and a.alias_info.is_write]


def record(path, variant, device="sm_90"):
    sys.path.insert(0, str(TESTS))
    from ptx_emulator.session import Emulation

    with tempfile.TemporaryDirectory() as folder:
        kernels = TESTS.parent / "build" / "kernels"
        emulation, package = Emulation(folder, kernels, device), load_package(variant)
        from ptx_emulator.agreement_calls import calls

        data, missing = (
            [],
            {f["entry"] for f in json.loads((kernels / "index.json").read_text()) if f["arch"] == f"{device}a"},
        )
        for name, kind, op, arguments in calls():
            if "widened first" in name and device != "sm_90":
                continue  # only SM90 has programs that widen a cache
            function = operator(package, op)
            before = [x.clone() if i in written(function) and x is not None else x for i, x in enumerate(arguments)]
            emulation.driver.programs.clear()
            emulation.wrapped(function)(*arguments)
            programs = [emulation.driver.manifests[entry]["program"] for entry in emulation.driver.programs]
            missing -= emulation.driver.programs.keys()
            results = {i: arguments[i] for i in written(function) if arguments[i] is not None}
            data.append((name, kind, op, before, results, programs))
    torch.save(data, path)
    print(f"{len(data)} calls recorded in {path}; programs without one: {', '.join(sorted(missing)) or 'none'}")
    return int(bool(missing) and device == "sm_90")


def on_gpu(x):
    """The same view of a copy of the whole storage."""
    if not isinstance(x, torch.Tensor):
        return x
    storage = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()).cuda().untyped_storage()
    return torch.empty(0, dtype=x.dtype, device="cuda").set_(storage, x.storage_offset(), x.shape, x.stride())


def difference(got, want):
    """(elements that differ in bits, largest error in ulps at the row's largest value or None if not such a float)."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    differ = int((got.contiguous().view(integer) != want.contiguous().view(integer)).sum())
    if got.dtype not in ALLOWED_ULPS["normal"]:
        return differ, None
    a, b = got.double(), want.double()
    same = (a == b) | (a.isnan() & b.isnan())
    largest = torch.where(b.isfinite(), b.abs(), 0.0).amax(-1, keepdim=True).clamp(min=1e-30)
    ulp = torch.finfo(got.dtype).eps * 2.0 ** largest.log2().floor()
    error = torch.where(same, 0.0, (a - b).abs() / ulp)
    return differ, float(error.nan_to_num(torch.inf).max()) if error.numel() else 0.0


def allowed(kind, dtype, fp8_queries):
    """Most ulps, None for integers and bytes that must be the same, infinity for selections by inexact fp8 scores."""
    if fp8_queries and kind == "normal":
        return FP8_QUERIES.get(dtype, torch.inf)
    return None if kind == "exact" else ALLOWED_ULPS[kind].get(dtype)


class Table:
    """Per key: outputs compared, their elements, those whose bits differ, the largest error and the largest allowed."""

    def __init__(self, *columns):
        self.columns, self.rows = [*columns, "outputs", "elements", "bits differ", "worst, ulps", "allowed"], {}

    def add(self, key, elements, differ, *errors):
        row = self.rows.setdefault(key, [0, 0, 0, None, None])
        row[:3] = row[0] + 1, row[1] + elements, row[2] + differ
        for i, error in enumerate(errors, 3):
            row[i] = max((x for x in (row[i], error) if x is not None), default=None)

    def show(self):
        lines = [self.columns, ["---"] * len(self.columns)]
        for key, (*counts, worst, most) in self.rows.items():
            lines.append([*key, *map(str, counts), *("-" if x is None else f"{x:.3g}" for x in (worst, most))])
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def examples(got, want, most=3):
    """The first elements that differ: their places and both values."""
    places = (got.float() != want.float()).nonzero()[:most]
    return "; ".join(f"{p.tolist()}: {got[tuple(p)].item()!r} for {want[tuple(p)].item()!r}" for p in places)


def compare(path, variant):
    package = load_package(variant)
    by_call, by_program, notes, failed = Table("call", "data", "output"), Table("program", "data", "output"), [], False
    for name, kind, op, arguments, want, programs in torch.load(path, weights_only=True):
        function = operator(package, op)
        fp8_queries = op == "select_blocks" and arguments[2].dtype == torch.float8_e4m3fn
        arguments = [on_gpu(x) for x in arguments]
        function(*arguments)
        torch.cuda.synchronize()
        for i, expected in want.items():
            got, label = arguments[i].cpu(), function._schema.arguments[i].name
            differ, ulps = difference(got, expected)
            limit = allowed(kind, got.dtype, fp8_queries)
            by_call.add((name, kind, label), got.numel(), differ, ulps, limit)
            for program in programs:
                by_program.add((program, kind, str(got.dtype)[6:]), got.numel(), differ, ulps, limit)
            wrong = differ > 0 if limit is None else ulps is not None and ulps > limit
            failed |= wrong
            if wrong or (differ and kind != "normal"):
                word = "DISAGREES" if wrong else "differs"
                notes.append(f"{word}: {name}, {kind}, {label}: {differ} of {got.numel()}, {examples(got, expected)}")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    print(by_call.show(), by_program.show(), "\n".join(notes), sep="\n\n")
    print("\nDISAGREES" if failed else "\nAGREES")
    return int(failed)


def both(variant, device):
    """`record` in a process of its own: the emulator is that process's CUDA driver."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "calls.pt"
        command = [sys.executable, __file__, "record", "--file", file, "--variant", variant, "--device", device]
        subprocess.run(command, check=True)
        return compare(file, variant)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["record", "compare", "both"])
    parser.add_argument("--file", help="what `record` writes and `compare` reads")
    parser.add_argument("--variant", required=True, help="folder of the built CUDA variant")
    parser.add_argument("--device", default="sm_90", help="the card whose programs are recorded")
    options = parser.parse_args()
    if options.what == "both":
        return both(options.variant, options.device)
    if options.file is None:
        parser.error(f"{options.what} needs --file")
    if options.what == "record":
        return record(options.file, options.variant, options.device)
    return compare(options.file, options.variant)


if __name__ == "__main__":
    sys.path.pop(0)  # this folder's modules have common names
    sys.exit(main())
