"""What `make test` runs inside the environment: build the variants, then pytest. Arguments go to pytest.

The CUDA variant's programs run on the CPU in a session of their own, in the PTX emulator (docs/ptx_emulator.md). Where
there is a GPU, so do the tests below tests/gpu, alone and on that variant."""

import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import build
import cuda_extension
from project import ROOT, load_project

WORKERS = 2


def main() -> int:
    project, out, start = load_project(), ROOT / "build", time.monotonic()
    print(f"Built {build.build_cpu(project, out).name}.", flush=True)
    reason = cuda_extension.missing_tools()
    if reason is None:
        print(f"Built {build.build_cuda(project, out).name}.", flush=True)
    else:
        banner = "!" * 100
        print(f"{banner}\nTHE CUDA VARIANT WAS NOT BUILT: {reason}.\nIts tests are skipped.\n{banner}", flush=True)
    print(f"Building took {time.monotonic() - start:.0f} s.", flush=True)
    variant = out / build.cuda_variant_name(project) if reason is None else None
    return max(subprocess.call(command, cwd=ROOT) for command in sessions(sys.argv[1:], variant, has_gpu()))


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def sessions(given: list[str], cuda_variant: Path | None, gpu: bool) -> list[list[str]]:
    """The pytest commands; `cuda_variant` is the built CUDA variant, None where it can't be built."""
    pytest = [sys.executable, "-m", "pytest"]
    workers = [] if any(a.startswith("-n") for a in given) else ["-n", str(min(WORKERS, os.cpu_count() or 1))]
    if given:
        return [[*pytest, *workers, *given]]
    tests, on_gpu = ROOT / "tests", ROOT / "tests" / "gpu"
    emulated = sorted(str(path) for path in tests.glob("test_emulated_*.py"))
    skipped = [f"--ignore={path}" for path in emulated] if cuda_variant else []
    result = [[*pytest, *workers, str(tests), *skipped, *([f"--ignore={on_gpu}"] if gpu and cuda_variant else [])]]
    if cuda_variant:
        # A file's tests stay in one process: its last one looks at what the others have executed.
        by_file = ["--dist", "loadfile", "--backend", "emulated", "--variant", str(cuda_variant)]
        result.append([*pytest, *workers, *by_file, *emulated])
        if gpu:
            result.append([*pytest, str(on_gpu), "--variant", str(cuda_variant)])
    return result


if __name__ == "__main__":
    sys.exit(main())
