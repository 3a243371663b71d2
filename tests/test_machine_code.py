"""Gates on the machine code of the programs for SM100 and SM103, and the table of all programs (docs/machine_code.md).

What the cubin's ELF file says is always checked; what needs a disassembly, where nvdisasm is (requirements-test.txt brings it).
"""

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import machine_code  # noqa: E402

KERNELS = ROOT / "build" / "kernels"
INDEX = json.loads((KERNELS / "index.json").read_text()) if (KERNELS / "index.json").exists() else []
OWN = {path.stem for path in (ROOT / "kernel-src" / "sm100").glob("*.py")}
BLACKWELL = [facts for facts in INDEX if facts["arch"] in ("sm_100a", "sm_103a")]
# Programs of kernel-src/sm100; the folds there are neutral code. What sm_100a's disassembly shows stands for sm_103a.
TENSOR = [facts for facts in BLACKWELL if facts["kernel"] in OWN and not facts["program"].startswith("prefill_fold")]
DISASSEMBLED = [facts for facts in TENSOR if facts["arch"] == "sm_100a"]
MOST_SHARED, REGISTER_FILE, COLUMNS = 227 << 10, 65536, 512
named = {"ids": lambda facts: facts["name"]}

pytestmark = pytest.mark.skipif(not INDEX, reason="the kernels aren't exported (python tools/build.py cuda)")


def ptx(facts):
    return (KERNELS / f"{facts['name']}.ptx").read_text()


def threads(facts):
    x, y, z = facts["block"]
    return x * y * z


def test_no_program_for_blackwell_spills():
    assert len(BLACKWELL) > 100
    assert [facts["name"] for facts in BLACKWELL if facts["stack_bytes"]] == []


def test_registers_and_shared_memory_fit():
    for facts in BLACKWELL:
        # Given to a warp by 256, to four warps at a time.
        warps = -(-threads(facts) // 128) * 4
        assert warps * -(-facts["registers"] * 32 // 256) * 256 <= REGISTER_FILE, facts["name"]
        assert facts["dynamic_smem"] <= MOST_SHARED, facts["name"]


@pytest.mark.parametrize("facts", TENSOR, **named)
def test_tensor_memory_fits(facts):
    """One allocation of a power of two of columns, and its release."""
    text = ptx(facts)
    found = []
    for what in (r"tcgen05\.alloc\.\S+ \[%\w+\], (%\w+);", r"tcgen05\.dealloc\.\S+ %\w+, (%\w+);"):
        [register] = re.findall(what, text)
        values = set(re.findall(rf"mov\.b32 \s*{re.escape(register)}, (\d+);", text))
        assert len(values) == 1, (what, values)
        found.append(int(values.pop()))
    assert found[0] == found[1] <= COLUMNS and found[0] >= 32 and found[0] & (found[0] - 1) == 0


@pytest.fixture(scope="module")
def nvdisasm():
    program = machine_code.disassembler()
    if program is None:
        pytest.skip("no nvdisasm (pip install nvidia-cuda-nvdisasm)")
    return program


@pytest.mark.parametrize("facts", DISASSEMBLED, **named)
def test_machine_code(nvdisasm, facts):
    code = machine_code.disassemble(KERNELS / f"{facts['name']}.cubin", nvdisasm)
    mix = code.mix()
    issued = len(re.findall(r"tcgen05\.mma\.", ptx(facts)))
    matrix = [i.opcode for i in code.instructions if machine_code.MATRIX.fullmatch(i.opcode)]
    assert len(matrix) >= issued > 0 and all(opcode.startswith("UTC") for opcode in matrix)
    assert any(i.opcode == "UTMALDG" for i in code.instructions)
    assert any(i.opcode == "LDTM" for i in code.instructions)
    assert mix["local"] == 0
    # Registers that roles hand over: a role never gets more than a thread can have.
    handed = [i.operands for i in code.instructions if i.opcode == "USETMAXREG"]
    moved = [int(n, 16) for operands in handed for n in re.findall(r"0x([0-9a-f]+)", operands)]
    assert all(24 <= n <= 256 for n in moved)
    loops = code.work_loops()
    assert loops
    for loop in loops:
        divisions = [i.opcode for i in loop if machine_code.DIVISION.fullmatch(i.opcode)]
        assert not divisions, f"a division in a loop of {len(loop)} instructions: {divisions}"


def rows():
    """{(program, arch): the row's cells} of the table."""
    lines = (ROOT / "docs" / "machine_code.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return {(row[0], row[1]): row for row in cells[1:]}


def test_the_table_is_of_this_build():
    """`python tools/machine_code.py` renews it."""
    found = rows()
    assert set(found) == {(facts["program"], facts["arch"]) for facts in INDEX}
    for facts in INDEX:
        row = found[facts["program"], facts["arch"]]
        assert [int(row[2]), int(row[4]), int(row[5])] == [
            threads(facts),
            facts["dynamic_smem"],
            facts["stack_bytes"],
        ], row
        # One of two forms may have some registers more.
        assert abs(int(row[3]) - facts["registers"]) <= 8, row


def test_the_table_counts_instructions(nvdisasm):
    found = rows()
    for facts in DISASSEMBLED[::5]:
        mix = machine_code.disassemble(KERNELS / f"{facts['name']}.cubin", nvdisasm).mix()
        row = found[facts["program"], facts["arch"]]
        assert int(row[6]) == pytest.approx(mix["all"], rel=0.05)
        assert int(row[7]) == mix["matrix"]
