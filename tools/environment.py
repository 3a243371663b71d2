"""Set up .venv with the packages that a requirements file pins. Needs Python 3.10 or newer and nothing else.

    python3 tools/environment.py requirements.txt

Does nothing when the environment already has them: a stamp holds the interpreter and a hash of the files.
"""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".venv"
OLDEST_PYTHON = (3, 10)


def requirement_files(path: Path) -> list[Path]:
    """The file and those that it includes with -r."""
    found = [path]
    for line in path.read_text().splitlines():
        if line.startswith("-r "):
            found += requirement_files(path.parent / line[3:].strip())
    return found


def fingerprint(path: Path) -> str:
    digest = hashlib.sha256(f"{sys.version} {Path(sys.base_prefix)} {ENVIRONMENT}".encode())
    for file in requirement_files(path):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def create() -> None:
    """A fresh environment; one of another interpreter or from a moved folder is of no use."""
    shutil.rmtree(ENVIRONMENT, ignore_errors=True)
    done = subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], capture_output=True, text=True)
    if done.returncode != 0:
        shutil.rmtree(ENVIRONMENT, ignore_errors=True)
        output = done.stdout + done.stderr
        sys.exit(f"Could not create {ENVIRONMENT.name} (does this Python have the venv module?):\n{output}")


def ensure(requirements: Path) -> None:
    stamp, wanted = ENVIRONMENT / f"stamp-{requirements.stem}", fingerprint(requirements)
    if stamp.exists() and stamp.read_text() == wanted:
        return
    origin = ENVIRONMENT / "stamp-interpreter"
    interpreter = f"{sys.version} {ENVIRONMENT}"
    if not origin.exists() or origin.read_text() != interpreter:
        create()
        origin.write_text(interpreter)
    print(f"Installing {requirements.name} into {ENVIRONMENT.name} (downloads torch the first time) ...", flush=True)
    python = ENVIRONMENT / "bin" / "python"
    command = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check", "-r", str(requirements)]
    if subprocess.run(command, stdout=sys.stderr).returncode != 0:
        sys.exit(f"Installing {requirements.name} failed; pip's messages are above.")
    stamp.write_text(wanted)


def main() -> None:
    if sys.version_info < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        sys.exit(f"m3-sparse needs Python {oldest} or newer, this is {sys.version.split()[0]}.")
    if len(sys.argv) != 2:
        sys.exit("usage: environment.py REQUIREMENTS_FILE")
    ensure(ROOT / sys.argv[1])


if __name__ == "__main__":
    main()
