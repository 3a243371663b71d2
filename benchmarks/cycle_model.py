"""What a kernel should take, from its machine code and the rates of a card's units; checked against an H200's measurements.

    python benchmarks/cycle_model.py            the check: predictions beside benchmarks/results/h200.json
    python benchmarks/cycle_model.py --b200 [--write docs/sm100.md]
                                                and predictions for a B200, printed only if the check holds
    python benchmarks/cycle_model.py --count    renew benchmarks/cycle_counts.json from build/kernels (needs nvdisasm)

A problem is work for four resources: the tensor cores, the schedulers (of a 128 x 128 tile, as many cycles as the busiest of issue,
ALU, FMA and special-function unit needs for the instructions of the kernel's loop), L2 and memory. Alone each would take a time t;
together (sum t^3)^(1/3), which is the longest where one binds and up to 1.6 times that where several do. The exponent and the time of a
launch were chosen on the H200. Latencies are not in it: problems that fill no card, decode of less than 256 (row, KV head) pairs
among them, are left out.
"""

import argparse
import json
import math
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
COUNTS, RESULTS = HERE / "cycle_counts.json", HERE / "results" / "h200.json"
OVERLAP, TOLERANCE = 3.0, 0.20
BEGIN, END = "<!-- predictions: begin -->", "<!-- predictions: end -->"


@dataclass(frozen=True)
class Card:
    multiprocessors: int
    clock: float  # GHz, of the schedulers
    matrix: float  # TFLOP/s of 16-bit products that long products keep up; 8 bits: twice
    memory: float  # TB/s, mostly reads
    l2_reads: float  # TB/s
    l2_writes: float
    launch: float  # us, with what a kernel needs to begin and to end


# H200: matrix is the middle of cuBLAS's 673 to 787 in the run of the results, memory what read-only scans reach, L2 reads what a
# peer's kernel must have had, L2 writes what makes two reads and a write 5.5 TB/s, the clock that of a card at its power limit.
H200 = Card(132, 1.65, 730.0, 4.4, 7.9, 3.4, 3.5)
# B200: 148 multiprocessors. 1,600 is what flash-attention-4 claims there, 24 TB/s of L2 what Fireworks claims (writes in the H200's
# proportion); memory is the specification's 8.0 times what the H200 reaches of its own (4.4 of 4.8). None was measured here.
B200 = Card(148, 1.85, 1600.0, 7.3, 24.0, 10.3, 3.5)

# Cycles of a scheduler for a warp instruction, by the pipe that executes it (all take one of issue).
PIPES = {
    "special functions": (8, ("MUFU",)),
    "ALU": (
        2,
        (
            "FMNMX",
            "FMNMX3",
            "VIMNMX",
            "VIMNMX3",
            "ISETP",
            "FSETP",
            "SEL",
            "FSEL",
            "LOP3",
            "SHF",
            "F2FP",
            "PRMT",
            "IADD3",
        ),
    ),
    "FMA": (1, ("FFMA", "FADD", "FMUL", "IMAD")),
    "FMA pairs": (2, ("FFMA2", "FADD2", "FMUL2")),
}
# kernel -> (program, warps of a scheduler that each go once through the loop for a tile of 128 x 128)
LOOPS = {
    "dense sm_90": ("dense_bf16_m128_sm90a", 2),
    "kv_stationary sm_90": ("prefill_bf16_bf16_r16_sm90a", 2),
    "select sm_90": ("prefill_score_bf16_bf16_top16_sm90a", 1),
    "select fp8 sm_90": ("prefill_score_e4m3_e4m3_top16_sm90a", 1),
    "dense sm_100": ("dense_bf16_m256_sm100a", 1),
    "kv_stationary sm_100": ("prefill_bf16_bf16_r16_sm100a", 1),
    "kv_stationary fp8 sm_100": ("prefill_bf16_e4m3_r16_sm100a", 1),
    "select sm_100": ("prefill_score_bf16_bf16_top16_sm100a", 1),
    "select fp8 sm_100": ("prefill_score_e4m3_e4m3_top16_sm100a", 1),
}


def count(kernels, program_of_nvdisasm):
    """{kernel: {opcode: times in the loop}} of the programs that there are. Left out: a masked path beside the plain one, and
    SM90's maxima in floating point, for scores below zero."""
    import machine_code

    result = {}
    for kernel, (program, _) in LOOPS.items():
        cubin = kernels / f"{program}.cubin"
        if not cubin.exists():
            continue
        code = machine_code.disassemble(cubin, program_of_nvdisasm)
        first, _ = code.blocks()
        ends = [*first[1:], len(code.instructions)]
        needed = ("FMNMX3", "VIMNMX3") if "select" in kernel else ("MUFU",)
        found = []
        for loop in code.loops():
            bodies = [code.instructions[first[b] : ends[b]] for b in loop]
            rare = ("FSEL", "FMNMX") if "select" in kernel else ("FSEL",)
            bodies = [body for body in bodies if all(sum(i.opcode == op for i in body) < 60 for op in rare)]
            counts = Counter(i.opcode for body in bodies for i in body)
            if sum(n for op, n in counts.items() if op in needed) >= 40:
                found.append(counts)
        result[kernel] = dict(sorted(min(found, key=lambda c: sum(c.values())).items()))
        if kernel.startswith("kv_stationary"):
            # The rows of the chunk before are combined beside the tiles.
            loops = [
                Counter(i.opcode for b in loop for i in code.instructions[first[b] : ends[b]]) for loop in code.loops()
            ]
            combining = [c for c in loops if c["LDGSTS"] >= 16 and c["FFMA"] + 2 * c["FFMA2"] >= 200]
            result[f"combination of {kernel}"] = dict(sorted(min(combining, key=lambda c: sum(c.values())).items()))
    return result


def cycles(kernel, counts):
    """Of a scheduler for a 128 x 128 tile, by pipe. The KV-stationary kernels' four warps that combine take a row of 16 partial
    outputs for two tiles, each a quarter of its columns."""
    loops = [(LOOPS[kernel][1], counts[kernel])]
    if f"combination of {kernel}" in counts:
        loops.append((0.5, counts[f"combination of {kernel}"]))
    used = {"issue": sum(times * sum(loop.values()) for times, loop in loops)}
    for pipe, (cost, ops) in PIPES.items():
        used[pipe] = sum(times * cost * sum(loop.get(op, 0) for op in ops) for times, loop in loops)
    used["FMA"] += used.pop("FMA pairs")
    return {pipe: round(n) for pipe, n in used.items()}


def combined(times):
    return sum(t**OVERLAP for t in times) ** (1 / OVERLAP)


def predict(card, kernel, counts, *, tiles=0.0, products=2, bits=16, memory=0.0, reads=0.0, writes=0.0, launches=1):
    """us. `tiles`: of 128 x 128 with 128 dims, of `products` matrix products each; memory, reads and writes of L2 in bytes."""
    matrix = tiles * products * 2 * 128**3 / (card.matrix * (16 / bits) * 1e6)
    work = max(cycles(kernel, counts).values()) if tiles else 0.0
    schedulers = tiles * work / (card.multiprocessors * card.clock * 1e3)
    l2 = reads / (card.l2_reads * 1e6) + writes / (card.l2_writes * 1e6)
    return launches * card.launch + combined([matrix, schedulers, memory / (card.memory * 1e6), l2])


# ---- problems: (what, keyword arguments of predict)


def dense(q_len, kv_len, heads, kv_heads, batch=1, causal=True, rows=128):
    """Tiles of `rows` rows; keys and values of a tile come from L2, memory sees them once."""
    group = heads // kv_heads
    step = rows // group
    total = 0
    for first in range(0, q_len, step):
        end = min(first + step, q_len)
        total += -(-((kv_len - q_len + end) if causal else kv_len) // 128)
    tiles = total * batch * kv_heads
    once = batch * kv_heads * kv_len * 512
    return {"tiles": tiles * rows / 128, "memory": once, "reads": tiles * 65536.0}


def dense_decode(q_len, kv_len, heads, kv_heads, batch):
    return {"memory": batch * kv_heads * kv_len * 512.0, "launches": 1 if batch * kv_heads >= 256 else 2}


def select(q_len, kv_len, heads, batch=1, bits=16):
    """Blocks before the own one, of every row; keys from L2 once a tile of 256 rows."""
    blocks = batch * sum((kv_len - q_len + t) // 128 for t in range(q_len))
    tiles = blocks * heads / 128
    return {"tiles": tiles, "products": 1, "bits": bits, "reads": tiles / 2 * 128 * 128 * bits / 8, "launches": 2}


def select_decode(kv_len, batch, size):
    return {"memory": batch * kv_len * 128.0 * size, "launches": 2}


def decode(batch, kv_heads, size):
    return {"memory": batch * kv_heads * 16 * 128 * 256.0 * size}


def kv_stationary(q_len, kv_len, kv_heads, group=16, size=2, chunk=2048, matrix_bits=16, combine=True):
    """16 random blocks a token. Q is gathered from L2; partial outputs go out and, with `combine`, come in again."""
    chunk = min(chunk, q_len)
    edges = fill = distinct = 0.0
    for first in range(0, q_len, chunk):
        tokens = min(chunk, q_len - first)
        visible = (kv_len - q_len + first + tokens / 2) / 128 + 0.5
        chosen = tokens * min(16.0, visible)
        of_a_block = chosen / visible
        per_tile = 128 // group
        edges += chosen
        fill += visible * (of_a_block / per_tile + 0.5 * (per_tile - 1) / per_tile)
        distinct += visible * (1 - math.exp(-of_a_block))
    partial = edges * kv_heads * group * 256.0
    keys = distinct * kv_heads * 128 * 256.0 * size
    passes = 2 if combine else 1
    # The list build's three launches take 25 us even for 512 tokens: each counts twice. The chunks' overlap.
    launches = (7 if combine else 1) + -(-q_len // chunk) * kv_heads * 0.25
    return {
        "tiles": fill * kv_heads, "bits": matrix_bits, "memory": passes * partial + keys,
        "reads": passes * partial + keys, "writes": partial, "launches": launches,
    }  # fmt: skip


def h200_problems():
    """[(row of the results, kernel, arguments)]: all of our rows of these kinds that fill the card."""
    problems = []
    for row in json.loads(RESULTS.read_text()):
        op, batch, q_len, kv_len = (row.get(key) for key in ("op", "batch", "q_len", "kv_len"))
        if op not in ("dense", "decode", "select", "prefill") or not row["impl"].startswith("ours") or batch is None:
            continue
        heads = [int(n) for n in str(row["heads"]).split("/")]
        size = 1 if row["dtype"].startswith("fp8") else 2
        if op == "dense" and q_len >= 128:
            args = dense(q_len, kv_len, *heads, batch, row["selection"] == "causal")
            problems.append((row, "dense sm_90", args))
        elif op == "dense" and q_len == 1 and batch >= 16:
            problems.append((row, "dense sm_90", dense_decode(q_len, kv_len, *heads, batch)))
        elif op == "decode" and q_len == 1 and batch * heads[1] >= 256:
            problems.append((row, "dense sm_90", decode(batch, heads[1], size)))
        elif op == "select" and q_len == 1 and batch >= 16 and batch * kv_len * size >= 1 << 20 and heads[0] == 4:
            problems.append((row, "dense sm_90", select_decode(kv_len, batch, size)))
        elif op == "select" and q_len >= 4096 and q_len * kv_len > 1 << 25 and heads[0] == 4 and row["impl"] == "ours":
            fp8 = row["dtype"] == "fp8q"
            args = select(q_len, kv_len, heads[0], batch, 8 if fp8 else 16)
            problems.append((row, f"select {'fp8 ' if fp8 else ''}sm_90", args))
        elif op == "prefill" and row["impl"] == "ours, kv_stationary" and row["selection"] == "random":
            args = kv_stationary(q_len, kv_len, heads[1], size=size, chunk=4096 if kv_len >= 131072 else 2048)
            problems.append((row, "kv_stationary sm_90", args))
    return problems


def check(counts):
    """[(description, measured us, predicted us)]"""
    result = []
    for row, kernel, args in h200_problems():
        name = f"{row['op']} {row['dtype']} {row['heads']} B={row['batch']} {row['q_len']} / {row['kv_len']}"
        name += f" {row['selection']}" if row["selection"] else ""
        result.append((name, row["ms_cold"] * 1e3, predict(H200, kernel, counts, **args)))
    return result


def b200_problems(counts):
    """[(description, kernel, arguments)] of docs/sm100.md."""
    problems = [
        ("dense bf16 64/4, 8k / 8k causal", "dense sm_100", dense(8192, 8192, 64, 4, rows=256)),
        ("dense bf16 64/4, 32k / 32k causal", "dense sm_100", dense(32768, 32768, 64, 4, rows=256)),
        ("dense decode bf16 64/4, 64 x 32k", "dense sm_100", dense_decode(1, 32768, 64, 4, 64)),
        ("decode bf16 64/4, B=64", "dense sm_100", decode(64, 4, 2)),
        ("decode fp8 64/4, B=256", "dense sm_100", decode(256, 4, 1)),
        ("score + top-k bf16, 64 x 128k", "dense sm_100", select_decode(131072, 64, 2)),
    ]
    for q_len, kv_len in ((8192, 8192), (32768, 32768), (4096, 131072)):
        name = f"{q_len >> 10}k / {kv_len >> 10}k"
        problems.append((f"selection bf16 4 heads, {name}", "select sm_100", select(q_len, kv_len, 4)))
        problems.append((f"selection fp8 queries, {name}", "select fp8 sm_100", select(q_len, kv_len, 4, bits=8)))
        chunk = 4096 if kv_len >= 131072 else 2048
        args = kv_stationary(q_len, kv_len, 4, chunk=chunk)
        problems.append((f"sparse prefill bf16 64/4 random, {name}", "kv_stationary sm_100", args))
    args = kv_stationary(4096, 61440, 1, size=1, chunk=4096, combine=False)
    problems.append(("forward alone, fp8 KV 16/1, 4k / 60k", "kv_stationary fp8 sm_100", args))
    return [problem for problem in problems if problem[1] in counts]


def b200_table(counts):
    """Markdown; only for a model that holds on the H200."""
    rows = [
        f"| {name} | {predict(B200, kernel, counts, **args):,.1f} |" for name, kernel, args in b200_problems(counts)
    ]
    return "\n".join(["| problem | predicted us |", "|---|---|", *rows])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--b200", action="store_true", help="print predictions for a B200 if the check holds")
    parser.add_argument("--write", type=Path, metavar="DOCUMENT", help="put them between the markers there, too")
    parser.add_argument("--count", action="store_true", help="renew the counts of instructions")
    parser.add_argument("--kernels", type=Path, default=HERE.parent / "build" / "kernels")
    options = parser.parse_args()
    if options.count:
        sys.path.insert(0, str(HERE.parent / "tools"))
        import machine_code

        program = machine_code.disassembler()
        if program is None:
            sys.exit("nvdisasm is needed: pip install nvidia-cuda-nvdisasm")
        COUNTS.write_text(json.dumps(count(options.kernels, program), indent=1) + "\n")
    counts = json.loads(COUNTS.read_text())
    print("cycles of a scheduler for a 128 x 128 tile; matrix products at 4,096 (SM90) or 8,192 (SM100) FLOP a cycle")
    for kernel in [kernel for kernel in LOOPS if kernel in counts]:
        used = ", ".join(f"{pipe} {n}" for pipe, n in cycles(kernel, counts).items())
        rate = (8192 if "sm_100" in kernel else 4096) * (2 if "fp8" in kernel and "select" in kernel else 1)
        print(f"  {kernel:26} matrix {(1 if 'select' in kernel else 2) * 2 * 128**3 // rate}, {used}")
    results = check(counts)
    print("\nH200, us: measured, predicted, ratio")
    for name, measured, predicted in results:
        print(f"  {name:50} {measured:10.1f} {predicted:10.1f} {predicted / measured:6.2f}")
    outside = [name for name, measured, predicted in results if abs(predicted / measured - 1) > TOLERANCE]
    print(f"{len(results) - len(outside)} of {len(results)} within {TOLERANCE:.0%}")
    if options.b200:
        if outside:
            sys.exit("the model does not hold on the H200: no prediction")
        print("\nB200; none of it has run\n\n" + b200_table(counts))
        if options.write:
            before, begin, rest = options.write.read_text().partition(BEGIN)
            _, end, after = rest.partition(END)
            options.write.write_text(f"{before}{begin}\n{b200_table(counts)}\n{end}{after}")


if __name__ == "__main__":
    main()
