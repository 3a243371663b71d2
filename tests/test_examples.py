"""The examples as a user starts them, on the torch backend. context_parallel_decode.py: test_distributed.py."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_distributed import example

ROOT = Path(__file__).resolve().parent.parent


def test_paged_decode_equals_every_request_alone(variant_folder):
    """Pages, shared prefixes, chunks, guesses and batches change no token; --check fails at the first that differs."""
    command = [sys.executable, "examples/paged_decode.py", "--variant", str(variant_folder), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stderr
    out = done.stdout
    assert "check: 100 of 100 tokens are those of each request alone\n" in out
    # Four of five prompts find the two full pages of the common prefix; guesses come true, and some don't.
    assert "found in shared pages" in out and int(re.search(r"(\d+) found", out)[1]) == 4 * 256
    assert 1.2 < float(re.search(r"([\d.]+) tokens a request and step", out)[1]) < 4
    assert re.search(r"100/100 .* tokens/s", done.stderr), "no progress bar"


def test_pages_are_shared_remembered_and_evicted():
    pages = example("paged_decode").Pages(3)
    first, second = pages.take(), pages.take()
    pages.remember(first, b"a")
    assert pages.find(b"a") == first and pages.find(b"b") is None and pages.room() == 1
    pages.release(first)
    assert pages.room() == 1, "still used once"
    pages.release(first)
    pages.release(second)
    assert pages.room() == 3 and pages.find(b"a") == first
    pages.release(first)
    taken = {pages.take() for _ in range(3)}
    assert taken == {0, 1, 2} and pages.find(b"a") is None, "evicted for want of room"
    with pytest.raises(KeyError):
        pages.take()


def test_guesses_are_what_followed_the_last_two_tokens():
    request = example("paged_decode").Request([5, 6, 7, 8, 9, 5, 6], 4)
    assert request.guesses() == [7, 8, 9]
    request.tokens += [1, 5, 6]
    assert request.guesses() == [1, 5, 6], "the latest place counts"
    request.tokens += [3]
    assert request.guesses() == [0, 0, 0], "never seen"


def test_the_engine_holds_what_its_graphs_read():
    """A CUDA graph keeps no tensor alive: one that only the recorded call held would be overwritten by later tensors."""
    paged, read = example("paged_decode"), []

    class Recorded:
        kernels = None

        def forward(self, tokens, positions, memory):
            read.extend([tokens, positions, memory.slots, memory.table, *memory.lengths.values()])
            return torch.zeros(len(tokens), 4)

        def logits(self, x):
            return x

    engine = paged.Engine(Recorded(), paged.SETTINGS["cpu"], torch.device("cpu"), torch.float32)
    for step in engine.steps.values():
        step()
    held = {x.untyped_storage().data_ptr() for x in engine.inputs.values()}
    assert len(read) == 6 * len(engine.steps) and {x.untyped_storage().data_ptr() for x in read} <= held
