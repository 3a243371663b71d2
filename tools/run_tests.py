"""What `make test` runs inside the environment: build the variants, then pytest. Arguments go to pytest.

Where there is a GPU, the tests below tests/gpu run in a session of their own, alone and on the CUDA variant."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import List, Optional

sys.path.insert(0, str(Path(__file__).resolve().parent))

import build  # noqa: E402
import cuda_extension  # noqa: E402
from project import ROOT, load_project  # noqa: E402

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
    variant = out / build.cuda_variant_name(project) if reason is None and has_gpu() else None
    return max(subprocess.call(command, cwd=ROOT) for command in sessions(sys.argv[1:], variant))


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def sessions(given: List[str], gpu_variant: Optional[Path]) -> List[List[str]]:
    """The pytest commands; `gpu_variant` is the built CUDA variant where a GPU is there to run it."""
    pytest = [sys.executable, "-m", "pytest"]
    workers = [] if any(a.startswith("-n") for a in given) else ["-n", str(min(WORKERS, os.cpu_count() or 1))]
    if given or gpu_variant is None:
        return [[*pytest, *workers, *(given or [str(ROOT / "tests")])]]
    gpu = str(ROOT / "tests" / "gpu")
    return [
        [*pytest, *workers, str(ROOT / "tests"), "--ignore", gpu],
        [*pytest, gpu, "--variant", str(gpu_variant)],
    ]


if __name__ == "__main__":
    sys.exit(main())
