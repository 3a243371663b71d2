"""Every program of the device's architecture once, on problems of a few rows, for compute-sanitizer.

    python tests/gpu/sanitizer_sweep.py --variant build/torch-stable-abi211-cu130-x86_64-linux --log FILE

runs the sweep under memcheck, racecheck, synccheck and initcheck (or under those of --tools) and writes what they said;
without --log it runs the sweep alone. Tensors are made on the CPU and copied, so that no kernel but ours is launched, and each has an allocation
of its own. Every answer is compared with the reference on the CPU. tests/test_sanitizer_sweep.py checks without a GPU
that no program is missing.
"""

import argparse
import datetime
import importlib.util
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
SECONDS = 60  # of a tool; about 20 are expected
SPLITS = (1, 2, 4, 16)  # CTAs a row of decode: the only programs with clusters
# Each warp of decode.py makes mbarriers of its own in a loop, which the tools count once: 3 of up to 17.
BARRIERS = "64"
# synccheck of 2025.3.1 ends with an illegal address in the first program with 16 CTAs a cluster, as in a right one of 60
# lines; that of 2026.4 is clean over all. Leaving them out has the rest checked.
SYNCCHECK_CLUSTER, SYNCCHECK_TAKES_ALL = 8, (2026, 4)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
STORED, FUSED = 2, 3  # ways of select_blocks
BY_SEQUENCE, WIDENED = 4, 5  # formulations of sparse_attention


def close(got, want, tolerance=2e-2):
    got, want = got.float().cpu(), want.float()
    assert torch.equal(got.isinf(), want.isinf()) and not got.isnan().any()
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def same_bytes(got, want):
    assert torch.equal(got.cpu().view(torch.uint8), want.view(torch.uint8))


class Sweep:
    """`ops` holds the extension's operators; without `reference` the answers are not looked at. Calls whose kernel has
    more than `largest_cluster` CTAs a cluster are left out."""

    def __init__(self, ops, device, reference=None, largest_cluster=16):
        self.ops, self.device, self.reference, self.largest_cluster = ops, device, reference, largest_cluster
        self.generator = torch.Generator().manual_seed(0)
        self.calls, self.left_out = 0, []

    def normal(self, *shape, dtype=FP32):
        return torch.randn(shape, generator=self.generator).to(dtype)

    def call(self, name, *arguments):
        """The operator on copies of the CPU tensors; returns the copies."""
        copies = [x.to(self.device, copy=True) if isinstance(x, torch.Tensor) else x for x in arguments]
        getattr(self.ops, f"aot_{name}")(*copies)
        self.calls += 1
        return copies

    def run(self):
        self.store()
        self.select()
        self.attend()
        self.dense()
        self.combine()
        self.prefill_select()
        self.prefill_attend()

    def store(self):
        kinds = [(BF16, BF16)] + list(itertools.product((BF16, FP16, FP32), (E4M3, E5M2)))
        slots = torch.tensor([5, -1, 130, 2**40, 255, 64, 0, 17, 191, 128, 3, 77, 99, 200, 201, 202, 203])
        for source, kept in kinds:
            rows = [self.normal(17, *heads, 128, dtype=source) for heads in ((2,), (2,), ())]
            caches = [torch.zeros(2, *heads, 128, 128).to(kept) for heads in ((2,), (2,), ())]
            scales = [None, None] if source == kept else [torch.tensor([0.5, 3.0]), torch.tensor([2.0])]
            got = self.call("store_kv", *rows, *caches, slots, *scales)
            if self.reference:
                self.reference.store_kv(*rows, *caches, slots, *scales)
                for one, other in zip(got[3:6], caches):
                    same_bytes(one, other)

    def select(self):
        for query, keys in ((BF16, BF16), (FP16, FP16), (BF16, E4M3), (FP16, E4M3)):
            for q_len in (1, 4, 8):  # 4 heads: one, two and four column tiles
                self.select_one(query, keys, [q_len, q_len], [300, 131], 64 if q_len == 4 else 128)
        self.select_one(BF16, BF16, [1], [257 * 128], 128)  # more blocks than `narrow` takes
        self.select_one(BF16, E4M3, [1], [2049 * 128 - 5], 128)  # and than `wide`

    def select_one(self, query_dtype, key_dtype, q_lens, kv_lens, page):
        tokens, width, pages = sum(q_lens), -(-max(kv_lens) // page), 7
        query, keys = self.normal(tokens, 4, 128, dtype=query_dtype), self.normal(pages, page, 128, dtype=key_dtype)
        table = torch.arange(len(q_lens) * width, dtype=torch.int32).view(len(q_lens), width) % pages
        cu = torch.tensor([0, *itertools.accumulate(q_lens)], dtype=torch.int32)
        tensors = (query, keys, table, cu, torch.tensor(kv_lens, dtype=torch.int32))
        ids, scores = torch.zeros(tokens, 4, 16, dtype=torch.int32), torch.zeros(tokens, 4, -(-width * page // 128))
        got = self.call("select_blocks", ids, scores, *tensors, 1, 0)
        kept = self.call("select_blocks", ids, None, *tensors, 1, 0)  # scores in a workspace, which starts as it is
        alone = self.call("block_scores", scores, *tensors)
        if self.reference:
            close(got[1], self._scores(scores, tensors), 1e-3)
            same_bytes(alone[0], got[1].cpu())
            same_bytes(kept[0], got[0].cpu())
            rows = self.reference.locate_rows(cu, tensors[4], tokens, width * page)
            count = self.reference.block_count(rows.end)
            assert torch.equal(got[0].cpu(), self.reference.select_from_scores(got[1].cpu(), count, 16, 1, 0))

    def _scores(self, scores, tensors):
        self.reference.block_scores(scores, *tensors)
        return scores

    def attend(self):
        for query, kept in ((BF16, BF16), (FP16, FP16), (BF16, E4M3), (BF16, E5M2)):
            for splits in SPLITS:
                # All links of a chain; a short row beside it, with draft tokens; a row of nothing.
                self.attend_one(query, kept, splits, [2, 1, 1], [2049, 131, 0], (16, 1) if splits < 16 else (8, 2))
        self.attend_one(FP16, E4M3, 16, [1], [700], (16, 1))

    def attend_one(self, query_dtype, kept, splits, q_lens, kv_lens, heads):
        if splits > self.largest_cluster:
            self.left_out.append(f"sparse_attention {query_dtype} {kept}: {splits} CTAs a cluster")
            return
        inputs = self.sparse_inputs(query_dtype, kept, q_lens, kv_lens, heads, 16)
        self.attend_by("sparse_attention", inputs, splits)

    def sparse_inputs(self, query_dtype, kept, q_lens, kv_lens, heads, topk, page=128):
        tokens, width, pages = sum(q_lens), -(-max(kv_lens) // page), 19
        q = self.normal(tokens, heads[0], 128, dtype=query_dtype)
        k, v = (self.normal(pages, heads[1], page, 128, dtype=kept) for _ in range(2))
        table = torch.arange(len(q_lens) * width, dtype=torch.int32).view(len(q_lens), width) % pages
        ids = torch.full((tokens, heads[1], topk), -1, dtype=torch.int32)
        cu = torch.tensor([0, *itertools.accumulate(q_lens)], dtype=torch.int32)
        for b, length in enumerate(kv_lens):
            blocks = torch.arange(-(-length // 128), dtype=torch.int32)[-topk:]
            ids[cu[b] : cu[b + 1], :, : len(blocks)] = blocks
        scale = torch.tensor([0.5]) if kept.itemsize == 1 else None
        return (q, k, v, ids, table, cu, torch.tensor(kv_lens, dtype=torch.int32), 128**-0.5, True, scale, scale)

    def attend_by(self, name, inputs, *how):
        out, lse = torch.zeros_like(inputs[0]), torch.zeros(inputs[0].shape[:2])
        got = self.call(name, out, lse, *inputs, *how)
        if self.reference:
            self.reference.sparse_attention(out, lse, *inputs)
            close(got[0], out)
            close(got[1], lse, 1e-3)

    def prefill_select(self):
        for query, keys in ((BF16, BF16), (FP16, FP16), (BF16, E4M3), (FP16, E4M3), (E4M3, E4M3)):
            for topk in (4, 20):
                self.prefill_select_one(query, keys, [40, 0, 9], [700, 5, 131], topk)

    def prefill_select_one(self, query_dtype, key_dtype, q_lens, kv_lens, topk):
        """Stored scores with their selection once a pair of dtypes, and the selection without scores."""
        tokens, width, pages = sum(q_lens), -(-max(kv_lens) // 128), 7
        query, keys = self.normal(tokens, 4, 128, dtype=query_dtype), self.normal(pages, 128, 128, dtype=key_dtype)
        table = torch.arange(len(q_lens) * width, dtype=torch.int32).view(len(q_lens), width) % pages
        cu = torch.tensor([0, *itertools.accumulate(q_lens)], dtype=torch.int32)
        tensors = (query, keys, table, cu, torch.tensor(kv_lens, dtype=torch.int32))
        ids, scores = torch.zeros(tokens, 4, topk, dtype=torch.int32), torch.zeros(tokens, 4, width)
        fused = self.call("select_blocks", ids, None, *tensors, 1, 0, FUSED)
        if topk > 16:
            return
        got = self.call("select_blocks", ids, scores, *tensors, 1, 0, STORED)
        if self.reference:
            close(got[1], self._scores(scores, tensors), 1e-2 if query_dtype == E4M3 else 1e-3)
            same_bytes(fused[0], got[0].cpu())

    def prefill_attend(self):
        """Union tiles and KV-stationary, each with a request; the latter also in chunks of one head, of up to 32 ids."""
        widens = self.device == "cpu" or torch.cuda.get_device_capability() == (9, 0)  # only SM90 widens a cache first
        for query, kept in ((BF16, BF16), (FP16, FP16), (BF16, E4M3), (FP16, E5M2)):
            inputs = self.sparse_inputs(query, kept, [9, 12, 0], [300, 1600, 64], (32, 2), 4, 64)
            ids, old = inputs[3], 12  # the second request's tokens disagree; `old` blocks are candidates of all
            for token in range(12):
                ids[9 + token] = (torch.arange(4, dtype=torch.int32) * 3 + token) % old
            self.attend_by("sparse_attention", inputs, 0, True, BY_SEQUENCE)
            if kept.itemsize == 1 and widens:
                self.attend_by("sparse_attention", inputs, 0, True, WIDENED)
        for query, kept in ((BF16, BF16), (FP16, FP16), (BF16, E4M3), (FP16, E4M3), (BF16, E5M2), (FP16, E5M2)):
            for group in (16, 8):
                topk = 20 if (query, kept) in ((BF16, E4M3), (FP16, E4M3)) else 4
                inputs = self.sparse_inputs(query, kept, [5, 11], [700, 131], (2 * group, 2), topk)
                self.attend_by("sparse_attention_kv_stationary", inputs, None, 8, 1)

    def dense(self):
        for dtype, splits in ((BF16, 1), (FP16, 2)):
            self.dense_one(dtype, splits, [2, 1, 1], [700, 131, 0], 128)  # tiles of 64 rows
            self.dense_one(dtype, splits, [30, 3], [300, 131], 64)  # and of 128

    def dense_one(self, dtype, splits, q_lens, kv_lens, page):
        tokens, width, pages = sum(q_lens), -(-max(kv_lens) // page), 7
        q = self.normal(tokens, 16, 128, dtype=dtype)
        k, v = (self.normal(pages, 1, page, 128, dtype=dtype) for _ in range(2))
        table = torch.arange(len(q_lens) * width, dtype=torch.int32).view(len(q_lens), width) % pages
        cu = torch.tensor([0, *itertools.accumulate(q_lens)], dtype=torch.int32)
        inputs = (q, k, v, table, cu, torch.tensor(kv_lens, dtype=torch.int32), 128**-0.5, True, None, None)
        out, lse = torch.zeros_like(q), torch.zeros(tokens, 16)
        got = self.call("dense_attention", out, lse, *inputs, splits)
        if self.reference:
            self.reference.dense_attention(out, lse, *inputs)
            close(got[0], out)
            close(got[1], lse, 1e-3)

    def combine(self):
        for kind, result in ((FP32, FP32), (FP32, BF16), (FP32, FP16), (BF16, BF16), (FP16, FP16)):
            outs, lses = self.normal(3, 5, 3, 128, dtype=kind), self.normal(3, 5, 3)
            lses[1] = -torch.inf
            out, lse = torch.zeros(5, 3, 128, dtype=result), torch.zeros(5, 3)
            got = self.call("merge_states", out, lse, outs, lses)
            if self.reference:
                self.reference.merge_states(out, lse, outs, lses)
                close(got[0], out)
                close(got[1], lse, 1e-3)


def sweep(variant, largest_cluster):
    location = Path(variant).resolve()
    spec = importlib.util.spec_from_file_location(
        "m3_sparse", location / "__init__.py", submodule_search_locations=[str(location)]
    )
    sys.modules["m3_sparse"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["m3_sparse"])
    from m3_sparse import ops, reference

    one = Sweep(getattr(ops, "ops", ops), "cuda", reference, largest_cluster)
    one.run()
    torch.cuda.synchronize()
    print(*(f"left out: {what}" for what in one.left_out), sep="\n")
    print(f"swept: {one.calls} calls, every answer right")


def watched(command, environment, seconds):
    """(output, exit status) of a command; it and what it started are ended after `seconds`."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        return process.communicate(timeout=seconds)[0], process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0], f"stopped after {seconds} s"


def largest_cluster(tool, version):
    """Of the programs that a tool is shown; `version` is the last line of `compute-sanitizer --version`."""
    found = re.search(r"(\d+)\.(\d+)", version)
    known = tuple(map(int, found.groups())) if found else (0, 0)
    return SYNCCHECK_CLUSTER if tool == "synccheck" and known < SYNCCHECK_TAKES_ALL else 16


def sanitize(variant, log, sanitizer, tools):
    """Runs the sweep once a tool; what the tools said goes to `log`. True if none had anything to say."""
    script = Path(__file__).resolve()
    command = [sys.executable, str(script), "--variant", str(variant)]
    # Each tensor its own allocation: an access past its end is past an allocation's.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    version = subprocess.run([sanitizer, "--version"], capture_output=True, text=True).stdout.strip().splitlines()
    version = version[-1] if version else sanitizer
    parts = [f"{datetime.date.today()}, {torch.cuda.get_device_name()}, {version}"]
    clean = True
    for tool in tools:
        start = time.monotonic()
        options = ["--tool", tool, "--error-exitcode", "9", "--print-limit", "1000", "--show-backtrace", "device"]
        options += ["--num-cuda-barriers", BARRIERS]
        limit = ["--largest-cluster", str(largest_cluster(tool, version))]
        text, status = watched([sanitizer, *options, *command, *limit], environment, SECONDS)
        summary = [line for line in text.splitlines() if "SUMMARY" in line]
        # A warning of racecheck leaves the exit status alone.
        clean = clean and status == 0 and bool(summary) and all("SUMMARY: 0 " in line for line in summary)
        verdict = f"{tool}: exit {status}, {time.monotonic() - start:.0f} s"
        print(verdict, *summary, sep="\n", flush=True)
        parts += ["", verdict, text.strip().replace(f"{script.parents[2]}/", "")]
    Path(log).parent.mkdir(parents=True, exist_ok=True)
    Path(log).write_text("\n".join(parts) + "\n")
    return clean


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variant", required=True)
    parser.add_argument("--log", type=Path, help="run under the sanitizer's tools and write their reports here")
    parser.add_argument("--sanitizer", default="compute-sanitizer")
    parser.add_argument("--tools", nargs="+", default=TOOLS, choices=TOOLS)
    parser.add_argument("--largest-cluster", type=int, default=16, help="without --log: leave out larger clusters")
    options = parser.parse_args()
    if options.log is None:
        sweep(options.variant, options.largest_cluster)
    elif not sanitize(options.variant, options.log, options.sanitizer, options.tools):
        sys.exit(1)


if __name__ == "__main__":
    main()
