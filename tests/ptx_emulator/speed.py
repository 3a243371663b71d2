"""Warp instructions a second of the emulator, on one core:

    python tests/ptx_emulator/speed.py --variant build/torch-stable-abi...

Calls of the decode attention programs through the operator, long enough that a launch's own cost is small; the best of
three after one that encodes the program. The time is the processor's, of the launch in the emulator.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch

TESTS = Path(__file__).resolve().parents[1]
POLICIES = ("eager", "eager+race", "random1")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variant", required=True)
    options = parser.parse_args()
    sys.path[0] = str(TESTS)  # this folder's modules have common names
    from ptx_emulator import driver
    from ptx_emulator.agreement import load_package
    from ptx_emulator.session import Emulation

    launch, seconds = driver.emulator.launch, []

    def timed(*args, **named):
        start = time.process_time()
        result = launch(*args, **named)
        seconds.append(time.process_time() - start)
        return result

    driver.emulator.launch = timed
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        emulation = Emulation(folder, TESTS.parent / "build" / "kernels")
        emulation.install(load_package(options.variant))
        import cases

        from m3_sparse import ops

        print("cache | CTAs a row | million warp instructions | " + " | ".join(f"M/s {p}" for p in POLICIES))
        for kv in (torch.bfloat16, torch.float8_e4m3fn):
            case = cases.make([1] * 16, [4096] * 16, heads=(64, 4), dtype=torch.bfloat16, kv_dtype=kv, style="clean")
            tensors, lengths = case.sparse()
            arguments = [*tensors, lengths["cu_seqlens_q"], lengths["seqused_k"], 128**-0.5, True, None, None]
            outputs = [torch.empty_like(case.q), torch.empty(case.q.shape[:2])]
            for splits in (1, 2, 4):
                rates = []
                for policy in POLICIES:
                    del seconds[:]
                    with emulation.policy(policy):
                        for _ in range(4):
                            ops.BUILT["sparse_attention", "aot"](*outputs, *arguments, splits)
                    count = emulation.driver.results[-1].instructions
                    rates.append(count / min(seconds[1:]) / 1e6)
                figures = " | ".join(f"{rate:.1f}" for rate in rates)
                print(f"{str(kv)[6:]} | {splits} | {count / 1e6:.1f} | {figures}", flush=True)


if __name__ == "__main__":
    main()
