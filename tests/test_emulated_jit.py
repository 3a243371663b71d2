"""The backend "jit": programs compiled during the call, run in the PTX emulator, beside the shipped ones.

Needs `--backend=emulated`, and nvidia-cutlass-dsl and flash-attn-4, which the suite installs to build the kernels.
"""

from pathlib import Path

import cases
import pytest
import torch

import m3_sparse
from m3_sparse import _jit

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


@pytest.fixture
def compiling(emulation, monkeypatch):
    """The emulator runs the PTX of what _jit compiled; {name: its cubin}."""
    texts, cubins, compile_program = {}, {}, _jit._compile

    def keep(kernel, name, folder):
        facts = compile_program(kernel, name, folder)
        texts[facts["entry"]] = (Path(folder) / f"{name}.ptx").read_text()
        cubins[name] = (Path(folder) / f"{name}.cubin").read_bytes()
        return facts

    def compiled_text(text):
        (entry,) = [e for e in texts if f" {e}(" in text]
        return texts[entry]

    monkeypatch.setattr(_jit, "_compile", keep)
    with m3_sparse.backend("jit"):
        emulation.driver.edit = compiled_text
        yield cubins
        emulation.driver.edit = None


def attention(case, **options):
    args, given = case.sparse()
    return m3_sparse.sparse_attention(*args, **given, return_lse=True, **options)


def selection(case):
    args, options = case.index()
    return (m3_sparse.select_blocks(*args, **options, topk=4, init_blocks=1, local_blocks=1),)


def store(case):
    k, v = torch.randn(2, 5, 2, 128, generator=torch.Generator().manual_seed(3)).to(BF16)
    caches = torch.zeros(2, 2, 2, 64, 128, dtype=E4M3)
    m3_sparse.store_kv(k, v, None, *caches, None, torch.tensor([3, -1, 70, 127, 0]))
    return (caches.view(torch.uint8),)


def merge(case):
    generator = torch.Generator().manual_seed(case.q.shape[0])
    return m3_sparse.merge_states(torch.randn(3, 4, 2, 128, generator=generator), torch.randn(3, 4, 2, generator=generator))


def dense(case):
    args, options = case.dense()
    return m3_sparse.dense_attention(*args, **options, return_lse=True)


CALLS = {
    "decode": attention,
    "union": lambda case: attention(case, formulation="union"),
    "kv_stationary": lambda case: attention(case, formulation="kv_stationary"),
    "select": selection,
    "store": store,
    "merge": merge,
    "dense": dense,
}


@pytest.mark.parametrize("name", CALLS)
def test_same_bits_as_aot_and_compiled_once(emulation, compiling, name):
    call, before = CALLS[name], len(_jit.compiled)
    lengths = [([2, 3], [300, 140]), ([1, 3], [70, 513])]
    problems = [cases.make(q, kv, heads=(32, 2), dtype=BF16, style="clean", topk=4, seed=5) for q, kv in lengths]
    got = [call(problems[0])]
    made = _jit.compiled[before:]
    assert made and set(made) == set(compiling), "the call compiled what it launched"
    got.append(call(problems[1]))
    assert _jit.compiled[before:] == made, "other lengths compile nothing"
    kernels = emulation.driver.kernels
    for program, cubin in compiling.items():
        assert cubin == (kernels / f"{program}.cubin").read_bytes(), f"{program} is not what was shipped"
    emulation.driver.edit = None
    with m3_sparse.backend("aot"):
        for case, results in zip(problems, got):
            for result, want in zip(results, call(case)):
                assert torch.equal(result, want)


def test_a_compilation_that_fails_says_so(emulation, compiling, monkeypatch):
    monkeypatch.setattr(_jit, "_compile", lambda kernel, name, folder: (_ for _ in ()).throw(RuntimeError(name)))
    case = cases.make([1], [64], heads=(16, 1), dtype=torch.float16, style="clean", topk=2, seed=1)
    with pytest.raises(RuntimeError, match="decode_f16"):
        attention(case)
    assert not _jit.ops.jit_set_active(False), "the switch is off again"
