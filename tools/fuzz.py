"""Fuzz the launcher: tests/fuzz/launcher.cpp with libFuzzer, AddressSanitizer and UndefinedBehaviorSanitizer, by clang.

    python tools/fuzz.py [--seconds 120] [--keep]

What it finds is left in build/fuzz, as are the inputs that reach new code. tests/fuzz/corpus.txt has those of earlier runs,
an input a line in hexadecimal, which tests/test_fuzz.py replays; `--keep` writes the smallest set that reaches as much.
"""

import argparse
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import cuda_extension
import lint
from project import ROOT

TARGET, CORPUS = ROOT / "tests" / "fuzz" / "launcher.cpp", ROOT / "tests" / "fuzz" / "corpus.txt"
CHECKED = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]


def write_corpus(folder: Path) -> list[Path]:
    """The inputs of the repository as files."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for line in CORPUS.read_text().split():
        paths.append(folder / line[:80])
        paths[-1].write_bytes(bytes.fromhex(line))
    return paths


def driver(work: Path) -> Path:
    """recording_driver.c as libcuda.so.1."""
    library = work / "libcuda.so.1"
    flags = ["-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1"]
    source = ROOT / "tests" / "recording_driver.c"
    subprocess.run([os.environ.get("CC", "cc"), *flags, str(source), "-o", str(library)], check=True)
    return library


def link(compiler: str, objects: list, work: Path, out: Path, *flags: str) -> Path:
    library = cuda_extension.torch_folder() / "lib"
    paths = [f"-Wl,-rpath,{library}", f"-Wl,-rpath,{work}", f"-L{library}"]
    names = ["-ltorch_cpu", "-lc10", str(driver(work)), "-ldl"]
    subprocess.run([compiler, *flags, *map(str, objects), "-o", str(out), *paths, *names], check=True)
    return out


def build(work: Path) -> Path:
    """The fuzzer."""
    compiler = shutil.which("clang++")
    if compiler is None:
        raise SystemExit("no clang++: on Debian, apt-get install clang")
    work.mkdir(parents=True, exist_ok=True)
    flags = lint.cpp_flags()
    tables = ROOT / "build" / "source" / "generated" / "cubins.cpp"
    sources = [TARGET, *(path for path in lint.cpp_sources() if path.name != "compat.cpp"), tables]

    def compiled(source: Path) -> Path:
        out = work / f"{source.stem}.o"
        checked = [] if source == tables else [*CHECKED, "-fsanitize=fuzzer-no-link"]
        inputs = ["-I", str(ROOT / "torch-ext"), "-c", str(source), "-o", str(out)]
        subprocess.run([compiler, "-g", "-O1", *checked, *flags, *inputs], check=True)
        return out

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, sources))
    return link(compiler, objects, work, work / "fuzzer", *CHECKED, "-fsanitize=fuzzer")


def replayer(objects: Path, work: Path) -> Path:
    """A program that runs inputs through the extension's own object files, by whatever compiler made them."""
    compiler = cuda_extension.find_compiler()
    out = work / "launcher.o"
    flags = ["-O1", "-DM3_REPLAY", *lint.cpp_flags("c++20"), "-I", str(ROOT / "torch-ext")]
    subprocess.run([compiler, *flags, "-c", str(TARGET), "-o", str(out)], check=True)
    built = [path for path in objects.rglob("*.o") if path.name != "compat.cpp.o"]
    return link(compiler, [out, *built], work, work / "replay")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=120)
    parser.add_argument("--keep", action="store_true", help="write tests/fuzz/corpus.txt afterwards")
    options = parser.parse_args()
    work = ROOT / "build" / "fuzz"
    fuzzer, found = build(work), work / "corpus"
    write_corpus(found)
    sanitizers = {
        # Workspaces of any size are allocated and never touched; the allocator must not fill them.
        "ASAN_OPTIONS": "alloc_dealloc_mismatch=0:detect_leaks=0:allocator_may_return_null=1:detect_container_overflow=0"
        ":max_malloc_fill_size=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    limits = ["-max_len=96", "-timeout=20", "-rss_limit_mb=4096", "-malloc_limit_mb=65536", f"-artifact_prefix={work}/"]
    environment = {**os.environ, **sanitizers}
    stop = [f"-max_total_time={options.seconds}", "-print_final_stats=1"]
    status = subprocess.run([fuzzer, *limits, *stop, found], env=environment).returncode
    if options.keep and status == 0:
        least = work / "least"
        shutil.rmtree(least, ignore_errors=True)
        least.mkdir()
        subprocess.run([fuzzer, *limits, "-merge=1", least, found], env=environment, check=True)
        CORPUS.write_text("".join(sorted(path.read_bytes().hex() + "\n" for path in least.iterdir())))
    return status


if __name__ == "__main__":
    sys.exit(main())
