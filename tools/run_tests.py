"""What `make test` runs inside the environment: build the variants, then pytest. Arguments go to pytest."""

import os
import subprocess
import sys
import time
from pathlib import Path

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
    arguments = sys.argv[1:] or [str(ROOT / "tests")]
    workers = [] if any(a.startswith("-n") for a in arguments) else ["-n", str(min(WORKERS, os.cpu_count() or 1))]
    return subprocess.call([sys.executable, "-m", "pytest", *workers, *arguments], cwd=ROOT)


if __name__ == "__main__":
    sys.exit(main())
