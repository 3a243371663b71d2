"""What the emulated tests show for one architecture holds for the others: their programs are the same PTX.

Needs `--backend=emulated`.
"""

import cases
import oracle
import pytest
import torch

from m3_sparse import ops


def text_of(driver, name):
    return (driver.kernels / f"{name}.ptx").read_text()


def test_programs_are_the_same_but_for_the_name(emulation):
    """A program that differs needs emulated tests of its own; list it here once it has them."""
    driver = emulation.driver
    by_program = {}
    for facts in driver.manifests.values():
        by_program.setdefault(facts["program"], {})[facts["arch"]] = facts["name"]
    for program, names in by_program.items():
        texts = {
            text_of(driver, name).replace(arch.replace("_", ""), "ARCH").replace(arch, "ARCH")
            for arch, name in names.items()
        }
        assert len(texts) == 1, f"{program} differs between {', '.join(names)}"


@pytest.mark.parametrize("architecture", ["sm100a", "sm103a"])
def test_they_run(emulation, architecture):
    case = cases.make([1, 2], [300, 700], heads=(32, 2), dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn)
    (q, k_cache, v_cache, ids, table), options = case.sparse()
    out, lse = cases.nan_like(q.shape, q.dtype), cases.nan_like(q.shape[:2], torch.float32)
    lengths = (options["cu_seqlens_q"], options["seqused_k"])
    emulation.driver.architecture = architecture
    try:
        with emulation.policy("eager+race"):
            call = ops.BUILT["sparse_attention", "aot"]
            call(out, lse, q, k_cache, v_cache, ids, table, *lengths, 128**-0.5, True, None, None, 4)
    finally:
        emulation.driver.architecture = None
    args, options = case.sparse()
    oracle.check_attention(out, lse, *oracle.sparse_attention(*args, **options))
    assert any(entry.endswith(f"_{architecture}_0") for entry in emulation.driver.programs)
