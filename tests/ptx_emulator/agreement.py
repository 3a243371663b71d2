"""Emulator against GPU: the same calls of the shipped programs, compared bit for bit.

    python tests/ptx_emulator/agreement.py record FILE --variant build/torch-stable-abi...    (no GPU needed)
    python tests/ptx_emulator/agreement.py compare FILE --variant build/torch-stable-abi...   (on a GPU)

`record` runs the calls in the emulator and writes arguments and results; `compare` repeats them on the GPU and prints, for
each kind of call and output, how many elements differ and by how many ulps at most. It fails if integers or stored
bytes differ, or floats by more than a program may owe to approximate instructions and to the order of sums inside a
tensor core instruction (float.cpp, mma.cpp).
"""

import argparse
import importlib.util
import sys
import tempfile
from pathlib import Path

import torch

TESTS = Path(__file__).resolve().parents[1]
# In units of the last place of the output's dtype, relative to the largest of a row.
ALLOWED_ULPS = {torch.bfloat16: 2, torch.float16: 4, torch.float32: 64}


def load_package(variant):
    spec = importlib.util.spec_from_file_location(
        "m3_sparse", Path(variant) / "__init__.py", submodule_search_locations=[str(variant)]
    )
    sys.modules["m3_sparse"] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    return package


def calls(package):
    """(name, operator, arguments): small problems that reach every program of the decode step."""
    import cases

    bf16, fp16, e4m3, e5m2 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2
    for q, kv in [(bf16, bf16), (fp16, fp16), (bf16, e4m3), (fp16, e4m3), (bf16, e5m2), (fp16, e5m2)]:
        for splits in (1, 2, 4, 16):
            case = cases.make([1, 3], [900, 300], heads=(16, 1), dtype=q, kv_dtype=kv, scales="head", seed=splits)
            (query, k_cache, v_cache, ids, table), options = case.sparse()
            out, lse = cases.nan_like(query.shape, q), cases.nan_like(query.shape[:2], torch.float32)
            lengths = (options["cu_seqlens_q"], options["seqused_k"])
            scales = (options["k_scale"], options["v_scale"], splits)
            name = f"sparse_attention {str(q)[6:]}+{str(kv)[6:]} s{splits}"
            tensors = [out, lse, query, k_cache, v_cache, ids, table, *lengths]
            yield name, "sparse_attention", [*tensors, 128**-0.5, True, *scales]
    for q, kv in [(bf16, bf16), (fp16, fp16), (bf16, e4m3), (fp16, e4m3)]:
        for q_lens in ([1, 2], [3, 4], [9, 8]):
            for kind in ("normal", "int"):  # products of small integers are exact whatever the order of a sum
                case = cases.make(q_lens, [1500, 300], heads=(4, 4), dtype=q, kv_dtype=kv, kind=kind, seed=3)
                (query, keys, table), lengths = case.index()
                blocks = -(-table.shape[1] * keys.shape[1] // 128)
                out = torch.full((query.shape[0], 4, 16), 7, dtype=torch.int32)
                scores = torch.full((query.shape[0], 4, blocks), torch.nan)
                arguments = [out, scores, query, keys, table, *lengths.values(), 1, 0]
                yield f"select_blocks {str(q)[6:]}+{str(kv)[6:]} {kind}", "select_blocks", arguments
    for source, kept in [(bf16, bf16)] + [(x, y) for x in (bf16, fp16, torch.float32) for y in (e4m3, e5m2)]:
        generator = torch.Generator().manual_seed(1)
        k, v = ((torch.randn(37, 2, 128, generator=generator) * 40).to(source) for _ in range(2))
        caches = [torch.zeros(3, 2, 64, 128).to(kept) for _ in range(2)]
        slots = torch.randperm(192, generator=generator)[:37]
        scales = (torch.rand(2, generator=generator) + 0.1, torch.rand(1, generator=generator) + 0.1)
        scales = scales if source != kept else (None, None)
        yield f"store_kv {str(source)[6:]}>{str(kept)[6:]}", "store_kv", [k, v, None, *caches, None, slots, *scales]
    for source, kept in [(torch.float32, t) for t in (torch.float32, bf16, fp16)] + [(bf16, bf16), (fp16, fp16)]:
        outs = torch.randn(5, 7, 3, 128, generator=torch.Generator().manual_seed(2)).to(source)
        lses = torch.randn(5, 7, 3, generator=torch.Generator().manual_seed(3)) * 8
        results = [torch.zeros(7, 3, 128, dtype=kept), torch.zeros(7, 3)]
        yield f"merge_states {str(source)[6:]}>{str(kept)[6:]}", "merge_states", [*results, outs, lses]


def written(function):
    """Positions of the arguments that an operator writes."""
    return [i for i, a in enumerate(function._schema.arguments) if a.alias_info is not None and a.alias_info.is_write]


def record(path, variant):
    sys.path.insert(0, str(TESTS))
    from ptx_emulator.session import Emulation

    with tempfile.TemporaryDirectory() as folder:
        emulation = Emulation(folder, TESTS.parent / "build" / "kernels")
        package = load_package(variant)
        where = {op: written(function) for (op, backend), function in package.ops.BUILT.items() if backend == "aot"}
        emulation.install(package)
        data = []
        for name, op, arguments in calls(package):
            before = [x.clone() if i in where[op] and x is not None else x for i, x in enumerate(arguments)]
            package.ops.BUILT[op, "aot"](*arguments)
            results = {i: arguments[i] for i in where[op] if arguments[i] is not None}
            data.append((name, op, before, results))
    torch.save(data, path)
    print(f"{len(data)} calls recorded in {path}")


def on_gpu(x):
    """The same view of a copy of the whole storage."""
    if not isinstance(x, torch.Tensor):
        return x
    storage = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()).cuda().untyped_storage()
    return torch.empty(0, dtype=x.dtype, device="cuda").set_(storage, x.storage_offset(), x.shape, x.stride())


def difference(got, want):
    """(elements that differ in bits, largest error in ulps of the row's largest value, or None for other than floats)."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    differ = int((got.contiguous().view(integer) != want.contiguous().view(integer)).sum())
    if got.dtype not in ALLOWED_ULPS:
        return differ, None
    a, b = got.double(), want.double()
    same = (a == b) | (a.isnan() & b.isnan())
    largest = torch.where(b.isfinite(), b.abs(), 0.0).amax(-1, keepdim=True).clamp(min=1e-30)
    ulp = torch.finfo(got.dtype).eps * 2.0 ** largest.log2().floor()
    error = torch.where(same, 0.0, (a - b).abs() / ulp)
    return differ, float(error.nan_to_num(torch.inf).max()) if error.numel() else 0.0


def compare(path, variant):
    package = load_package(variant)
    rows, failed = {}, False
    for name, op, arguments, want in torch.load(path, weights_only=True):
        arguments = [on_gpu(x) for x in arguments]
        package.ops.BUILT[op, "aot"](*arguments)
        torch.cuda.synchronize()
        for i, expected in want.items():
            got = arguments[i].cpu()
            label = package.ops.BUILT[op, "aot"]._schema.arguments[i].name
            differ, ulps = difference(got, expected)
            key = (name, label)
            total, bad, worst = rows.get(key, (0, 0, 0.0 if ulps is not None else None))
            rows[key] = (total + got.numel(), bad + differ, None if ulps is None else max(worst, ulps))
            failed |= differ > 0 if ulps is None else ulps > ALLOWED_ULPS[got.dtype]
    print("| call | output | elements | bits differ | worst, ulps of the row's largest |\n|---|---|---|---|---|")
    for (name, label), (total, bad, worst) in rows.items():
        print(f"| {name} | {label} | {total} | {bad} | {'-' if worst is None else f'{worst:.2f}'} |")
    print("AGREES" if not failed else "DISAGREES")
    return int(failed)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["record", "compare"])
    parser.add_argument("file")
    parser.add_argument("--variant", required=True, help="folder of the built CUDA variant")
    options = parser.parse_args()
    return record(options.file, options.variant) if options.what == "record" else compare(options.file, options.variant)


if __name__ == "__main__":
    sys.path.pop(0)  # this folder's modules have common names
    sys.exit(main())
