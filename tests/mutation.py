"""Do the tests notice a fault? Applies the seeded faults of mutants.py and kernel_mutants.py one at a time and runs the
tests beside each; then tests/test_emulated_faults.py, which does the same to the kernels' PTX.

    python tests/mutation.py [--only TEXT] [--smoke] [--python] [--missing] [--write]

Each mutant is a copy of the package (or of the launcher, compiled: one file and the link; or of the kernels' sources,
of which a few programs are compiled) in a temporary folder; nothing in the tree changes. Python's tests run in a
child forked after torch was imported. A mutant that its tests pass is a survivor: exit status 1. A kernel's fault
must be noticed too, or be declared in harmless_faults.py. `--write` puts each result into
docs/measurements/mutation.json and the tables made of them into docs/mutation.md; `--missing` runs what is not
noticed there. The kernels' part goes by programs, whose records it finds in build/ptx_emulator/faults.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))

import build
import cuda_extension
import kernel_mutants
import mutants
from project import load_project

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 300  # a mutant that hangs is noticed
ALL = mutants.ALL + kernel_mutants.ALL
KILLED, SURVIVED, BROKEN = "noticed", "survived", "no verdict"
NO_TESTS = 5  # pytest's exit status


def edited(text: str, mutant) -> str:
    if text.count(mutant.before) != 1:
        raise ValueError(f"{mutant.file}: {text.count(mutant.before)} places of {mutant.before!r} ({mutant.fault})")
    return text.replace(mutant.before, mutant.after)


# ---- Python: the package in a copy of the built variant ----


OPTIONS = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]


def in_child(arguments: list, log: Path, seconds: int = SECONDS) -> int:
    """pytest's exit status, in a forked child that has imported what is slow to import."""
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            with log.open("w") as out:
                os.dup2(out.fileno(), 1)
                os.dup2(out.fileno(), 2)
            import pytest

            code = int(pytest.main(arguments))
        finally:
            os._exit(code)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return 1


def passes(chosen: list, variant: Path, scratch: Path) -> bool:
    """Whether the tests of these mutants pass on the package as it is."""
    log, tests = scratch / "log", sorted({test for mutant in chosen for test in mutant.tests})
    passed = in_child([*OPTIONS, "--variant", str(variant), *tests], log, 10 * SECONDS) == 0
    if not passed:
        print(log.read_text()[-4000:], file=sys.stderr)
    return passed


def judge_python(mutant, variant: Path, scratch: Path) -> str:
    copy = scratch / "variant" / variant.name
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(variant, copy)
    path = copy / Path(mutant.file).name
    path.write_text(edited(path.read_text(), mutant))
    log = scratch / "log"
    code = in_child([*OPTIONS, "--variant", str(copy), *mutant.tests], log)
    if code not in (0, 1) and code > 0:
        print(log.read_text()[-2000:], file=sys.stderr)
    # A signal is a crash: noticed.
    return KILLED if code == 1 or code < 0 else SURVIVED if code == 0 else BROKEN


# ---- C++: one file compiled again, the rest as in build/cmake ----


class Extension:
    def __init__(self, project, scratch: Path):
        self.variant = build.build_cuda(project, ROOT / "build")
        self.tree = scratch / "tree"
        shutil.copytree(ROOT / "tests", self.tree / "tests", ignore=shutil.ignore_patterns("gpu", "__pycache__"))
        shutil.copytree(self.variant, self.tree / "build" / self.variant.name)
        (self.tree / "build" / "kernels").symlink_to(ROOT / "build" / "kernels")
        (self.tree / "torch-ext").symlink_to(ROOT / "torch-ext")
        ninja = [cuda_extension.program("ninja"), "-C", str(ROOT / "build" / "cmake"), "-t", "commands"]
        self.commands = subprocess.run(ninja, capture_output=True, text=True, check=True).stdout.splitlines()
        [library] = (self.tree / "build" / self.variant.name).glob("*.abi3.so")
        self.library = library

    def compile(self, mutant, scratch: Path) -> str:
        """The compiler's complaint, or nothing."""
        name = f"torch-ext/{mutant.file}"
        source = ROOT / "build" / "source" / name
        changed = scratch / Path(mutant.file).name
        changed.write_text(edited(source.read_text(), mutant))
        [command] = [line for line in self.commands if f"-c {source}" in line]
        words = shlex.split(command)
        former = words[words.index("-o") + 1]
        compiled = scratch / "changed.o"
        words[words.index("-c") + 1], words[words.index("-o") + 1] = str(changed), str(compiled)
        words += ["-I", str(source.parent), "-Wno-unused"]
        link = self.commands[-1].replace(former, str(compiled)).replace(f"-o {self.library.name}", f"-o {self.library}")
        for step in (shlex.join(words), link):
            done = subprocess.run(step, shell=True, cwd=ROOT / "build" / "cmake", capture_output=True, text=True)
            if done.returncode != 0:
                return done.stdout + done.stderr
        return ""

    def judge(self, mutant, scratch: Path) -> str:
        if complaint := self.compile(mutant, scratch):
            print(complaint[-2000:], file=sys.stderr)
            return BROKEN
        file, *checks = mutant.tests
        return SURVIVED if self.check(file, checks) else KILLED

    def check(self, file: str, checks: list) -> bool:
        command = [sys.executable, str(self.tree / "tests" / file), *checks]
        try:
            return subprocess.run(command, capture_output=True, timeout=SECONDS).returncode == 0
        except subprocess.TimeoutExpired:
            return False

    def passes(self, chosen: list) -> bool:
        """Whether the checks of these mutants pass with the library as it is."""
        files = {mutant.tests[0]: [] for mutant in chosen}
        for mutant in chosen:
            files[mutant.tests[0]] += [name for name in mutant.tests[1:] if name not in files[mutant.tests[0]]]
        return all(self.check(file, checks) for file, checks in files.items())


# ---- The kernels' sources: a few programs compiled again, the rest as in build/kernels; tests in the emulator ----


class Kernels:
    def __init__(self, project, scratch: Path):
        variant = build.build_cuda(project, ROOT / "build")
        self.sources, tree = scratch / "kernel-src", scratch / "emulated"
        self.variant, self.programs = tree / variant.name, tree / "kernels"
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "kernel-src", self.sources, ignore=ignore)
        shutil.copytree(variant, self.variant, ignore=ignore)
        self.stems = {facts["name"]: facts["kernel"] for facts in self.index()}
        self.restore()

    def index(self) -> list:
        return json.loads((ROOT / "build" / "kernels" / "index.json").read_text())

    def restore(self) -> None:
        shutil.rmtree(self.programs, ignore_errors=True)
        self.programs.mkdir()
        for path in (ROOT / "build" / "kernels").iterdir():
            (self.programs / path.name).symlink_to(path)

    def compile(self, mutant, scratch: Path) -> str:
        """The compiler's complaint, or nothing."""
        path = self.sources / mutant.file.removeprefix("kernel-src/")
        text = path.read_text()
        path.write_text(edited(text, mutant))
        try:
            for program in mutant.programs:
                arch = program.rsplit("_", 1)[1].replace("sm", "sm_")
                command = [sys.executable, "-B", str(self.sources / "export.py"), "--program", program, "--arch", arch]
                command += ["--only", self.stems[program], "--out", str(scratch / "compiled")]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode != 0:
                    return done.stderr
                changed, place = scratch / "compiled" / f"{program}.ptx", self.programs / f"{program}.ptx"
                if changed.read_text() == place.read_text():
                    return f"{program} is what it was"
                place.unlink()
                shutil.copyfile(changed, place)
        finally:
            path.write_text(text)
        return ""

    def judge(self, mutant, scratch: Path) -> str:
        try:
            if complaint := self.compile(mutant, scratch):
                print(complaint[-2000:], file=sys.stderr)
                return BROKEN
            code = self.check(mutant.tests, SECONDS)
        finally:
            self.restore()
        return {0: SURVIVED, 1: KILLED}.get(code, BROKEN)

    def check(self, tests, seconds: int) -> int:
        """pytest's exit status; 1 of tests that don't come to an end."""
        options = ["--backend=emulated", "--variant", str(self.variant), "--as-drawn"]
        command = [sys.executable, "-m", "pytest", *OPTIONS, *options, *tests]
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            return 1
        if done.returncode not in (0, 1):
            print(done.stdout[-2000:], done.stderr[-2000:], file=sys.stderr)
        return done.returncode

    def passes(self, chosen: list) -> bool:
        """Whether the tests of these mutants pass with the programs as they are."""
        tests = sorted({test for mutant in chosen for test in mutant.tests})
        return self.check(tests, 10 * SECONDS) == 0


def kind(mutant) -> str:
    """What a fault is in: python, cpp or kernels."""
    if mutant.file.startswith("kernel-src/"):
        return "kernels"
    return "python" if mutant.file.endswith(".py") else "cpp"


def run(chosen: list, keep) -> list:
    import hypothesis  # noqa: F401  what the children need not import again
    import pytest  # noqa: F401
    import torch

    torch.set_num_threads(1)
    project = load_project()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        python = build.build_cpu(project, ROOT / "build")
        of = {name: [mutant for mutant in chosen if kind(mutant) == name] for name in ("python", "cpp", "kernels")}
        if of["python"] and not passes(of["python"], python, scratch):
            raise SystemExit("Python's tests fail without a fault")
        extension = Extension(project, scratch) if of["cpp"] else None
        if extension and not extension.passes(of["cpp"]):
            raise SystemExit("the launcher's checks fail without a fault")
        kernels = Kernels(project, scratch) if of["kernels"] else None
        if kernels and not kernels.passes(of["kernels"]):
            raise SystemExit("the kernels' tests fail without a fault")
        for mutant in chosen:
            start = time.monotonic()
            if kind(mutant) == "python":
                verdict = judge_python(mutant, python, scratch)
            else:
                verdict = (extension if kind(mutant) == "cpp" else kernels).judge(mutant, scratch)
            seconds = round(time.monotonic() - start, 1)
            results.append({"fault": mutant.fault, "file": mutant.file, "verdict": verdict, "seconds": seconds})
            keep(results[-1])
            print(f"{verdict:10} {seconds:6.1f} s  {mutant.file}: {mutant.fault}", flush=True)
    return results


# ---- The kernels: pytest in the emulator ----


RECORDS = ROOT / "build" / "ptx_emulator" / "faults"


def recorded(since: float) -> dict:
    """{program: what its faults came to} of the runs since then."""
    found = {}
    for path in sorted(RECORDS.glob("*.json")):
        if path.stat().st_mtime >= since:
            rows = json.loads(path.read_text())
            left = [row for row in rows if row["by"] is None]
            harmless = [{name: row[name] for name in ("kind", "at", "harmless")} for row in left if row["harmless"]]
            found[path.stem] = {"faults": len(rows), "noticed": len(rows) - len(left), "harmless": harmless}
    return found


def kernel_faults(programs: str, keep) -> int:
    """pytest's exit status: 0 if each fault of the chosen programs (an expression of -k) is noticed or declared harmless."""
    start = time.time()
    variant = build.build_cuda(load_project(), ROOT / "build")
    command = [sys.executable, "-m", "pytest", "-q", str(ROOT / "tests" / "test_emulated_faults.py"), "--faults"]
    command += [
        "--backend=emulated",
        "--variant",
        str(variant),
        "-p",
        "no:xdist",
        "-k",
        f"are_noticed and ({programs})",
    ]
    code = subprocess.run(command, cwd=ROOT).returncode
    for name, found in recorded(start).items():
        keep(name, found)
        counts = f"{found['noticed']} of {found['faults']} noticed, {len(found['harmless'])} harmless"
        print(f"{name}: {counts}", flush=True)
    return code


# ---- The table ----

RESULTS, PAGE = ROOT / "docs" / "measurements" / "mutation.json", ROOT / "docs" / "mutation.md"
HEAD = """# Mutation test of the tests

Generated by `make mutants` from [its results](measurements/mutation.json). Each row is one fault put into
the sources (tests/mutants.py and, of the kernels, tests/kernel_mutants.py have the edit and the tests that must fail); the tests of an unbroken tree pass.
"""
KERNELS = (
    "Faults put into the PTX of shipped programs (a wait, barrier, fence or arrival dropped, a parity flipped, an address, "
    "count or descriptor changed), as noticed in the emulator by `tests/test_emulated_faults.py`: "
    "[how, and which kinds there are](ptx_emulator.md). The test requires that each is noticed or declared in "
    "`tests/harmless_faults.py` as one that changes nothing."
)


def kernel_tables(kernels: dict) -> list:
    """Lines: by program, and the harmless faults with their reasons."""
    rows = [(name, found["faults"], found["noticed"], len(found["harmless"])) for name, found in kernels.items()]
    rows.append(("all", *(sum(column) for column in list(zip(*rows))[1:])))
    lines = ["", "## Kernels", "", KERNELS, "", "| program | faults | noticed | harmless |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(map(str, row))} |" for row in rows]
    lines += ["", "Harmless:", "", "| programs | fault | at | why |", "|---|---|---|---|"]
    same = {}
    for name, found in kernels.items():
        for fault in found["harmless"]:
            same.setdefault((fault["kind"], fault["harmless"]), []).append((name, fault["at"]))
    for (kind, why), places in same.items():
        names, at = dict.fromkeys(name for name, _ in places), f"`{places[0][1]}`"
        lines.append(f"| {', '.join(names)} | {kind}{f', {len(places)}' if len(places) > 1 else ''} | {at} | {why} |")
    return lines


def page(results: dict) -> str:
    rows = results["sources"]
    noticed = sum(row["verdict"] == KILLED for row in rows)
    lines = [HEAD, f"{noticed} of {len(rows)} noticed.", "", "| file | fault | verdict |", "|---|---|---|"]
    lines += [f"| {row['file']} | {row['fault']} | {row['verdict']} |" for row in rows]
    lines += kernel_tables(results["kernels"]) if results["kernels"] else []
    return "\n".join(lines) + "\n"


def written() -> dict:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {"sources": [], "kernels": {}}


def write(row: dict) -> None:
    """Puts one result into its place, and leaves out faults that are no longer in the list."""
    results = written()
    rows = {**{known["fault"]: known for known in results["sources"]}, row["fault"]: row}
    save({**results, "sources": [rows[mutant.fault] for mutant in ALL if mutant.fault in rows]})


def write_kernel(name: str, found: dict) -> None:
    results = written()
    save({**results, "kernels": dict(sorted({**results["kernels"], name: found}.items()))})


def save(results: dict) -> None:
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(page(results))


def settled(found: dict) -> bool:
    return found["noticed"] + len(found["harmless"]) == found["faults"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="TEXT", help="faults whose name, file or program has this in it")
    parser.add_argument("--smoke", action="store_true", help="the few that make test runs")
    parser.add_argument("--python", action="store_true", help="none of the launcher's and the kernels'")
    parser.add_argument("--missing", action="store_true", help="what the written results do not hold as noticed")
    parser.add_argument("--write", action="store_true", help="write the results and docs/mutation.md")
    options = parser.parse_args()
    chosen = mutants.PYTHON if options.python else ALL
    if options.smoke:
        chosen = [mutant for mutant in mutants.PYTHON if mutant.fault in mutants.SMOKE]
    if options.only:
        chosen = [mutant for mutant in chosen if options.only in mutant.fault or options.only in mutant.file]
    if options.missing:
        seen = {row["fault"] for row in written()["sources"] if row["verdict"] == KILLED}
        chosen = [mutant for mutant in chosen if mutant.fault not in seen]
    os.chdir(ROOT)
    results = run(chosen, write if options.write else lambda row: None) if chosen else []
    noticed = sum(row["verdict"] == KILLED for row in results)
    if results:
        print(f"{noticed} of {len(results)} faults noticed", flush=True)
    if options.smoke or options.python:
        return 0 if noticed == len(results) else 1
    programs = "test" if options.only is None else options.only if options.only.isidentifier() else ""
    if options.missing:
        programs = " or ".join(
            name.split(" on ")[0] for name, found in written()["kernels"].items() if not settled(found)
        )
    code = kernel_faults(programs, write_kernel if options.write else lambda *found: None) if programs else NO_TESTS
    if code == NO_TESTS and not results:
        raise SystemExit("there is no such fault or program" if options.only else "nothing is missing")
    return 0 if noticed == len(results) and code in (0, NO_TESTS) else 1


if __name__ == "__main__":
    sys.exit(main())
