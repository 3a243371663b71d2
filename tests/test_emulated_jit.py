"""The backend "jit": programs compiled during the call, run in the PTX emulator, beside the shipped ones.

Needs `--backend=emulated`, and nvidia-cutlass-dsl and flash-attn-4, which the suite installs to build the kernels.
"""

from pathlib import Path

import cases
import jit_calls
import pytest
import torch

import m3_sparse
from m3_sparse import _jit


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


@pytest.mark.parametrize("name", jit_calls.CALLS)
def test_same_bits_as_aot_and_compiled_once(emulation, compiling, name):
    call, before = jit_calls.CALLS[name], len(_jit.compiled)
    problems = jit_calls.problems()
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
        jit_calls.attention(case)
    assert not _jit.ops.jit_set_active(False), "the switch is off again"
