"""The fuzzer's corpus, replayed without a fuzzer or clang: refusals and plausible launches, no crash (tests/fuzz/launcher.cpp)."""

import random
import re
import subprocess

import fuzz
import pytest


@pytest.fixture(scope="module")
def replay(cuda_variant, project, tmp_path_factory):
    objects = cuda_variant.parent / "cmake" / "CMakeFiles" / "extension.dir"
    return fuzz.replayer(objects, tmp_path_factory.mktemp("fuzz"))


def launches(replay, paths):
    done = subprocess.run([replay, *paths], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    count, launched = map(int, re.fullmatch(r"(\d+) inputs, (\d+) launches\n", done.stdout).groups())
    assert count == len(paths)
    return launched


def test_the_corpus(replay, tmp_path):
    corpus = fuzz.write_corpus(tmp_path)
    assert len(corpus) >= 100
    assert launches(replay, corpus) >= 20  # not everything is refused


def test_other_inputs(replay, tmp_path):
    generator = random.Random(7)
    paths = []
    for i in range(3000):
        paths.append(tmp_path / str(i))
        paths[-1].write_bytes(generator.randbytes(generator.randrange(4, 80)))
    assert launches(replay, paths) >= 20
