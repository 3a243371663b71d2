"""The table of faults in flash-attn-4's dense kernels for docs/ptx_emulator.md.

python tests/ptx_emulator/upstream_faults.py sm_90a
"""

import sys
from pathlib import Path

import torch

sys.path[0] = str(Path(__file__).resolve().parents[1])  # this folder's modules have common names

from ptx_emulator import faults, upstream  # noqa: E402
from ptx_emulator.launch import launch, load  # noqa: E402
from ptx_emulator.tensor_map import encode  # noqa: E402

ROWS = {"sm_90a": 256, "sm_100a": 384}
KEYS = 640


def main(arch):
    text = upstream.ptx("dense", arch, Path(__file__).resolve().parents[2] / "build" / "ptx_emulator")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, 1, 128, generator=generator).bfloat16() for n in (ROWS[arch], KEYS, KEYS))

    def attend(changed, policy):
        out, lse = torch.full_like(q, torch.nan), torch.full((1, 1, q.shape[1]), torch.nan)
        result = upstream.launch_dense(launch, encode, changed, arch, q, k, v, out, lse, faults.limited(policy))
        return out, lse, result.reports

    want, want_lse, _ = attend(text, "eager")

    def run(changed, policy):
        out, lse, reports = attend(changed, policy)
        right = (out.float() - want.float()).norm() <= 1e-4 * want.float().norm() and (
            lse - want_lse
        ).abs().max() < 1e-4
        return bool(right), reports

    for policy in faults.POLICIES:
        assert faults.trial(run, text, policy) is None, f"the program itself fails under {policy}"
    verdicts = [(m, faults.judge([run], m)) for m in faults.mutants(text, load(text, None))]
    print(faults.table(verdicts))
    for mutant, by in verdicts:
        if by is None:
            print(f"not noticed: {mutant.kind}, PTX line {mutant.line}")


if __name__ == "__main__":
    main(sys.argv[1])
