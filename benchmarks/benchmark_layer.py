"""One MiniMax-M3 sparse layer in transformers, a whole prompt in one forward: time and memory of our part.

    python benchmarks/benchmark_layer.py --variant build/torch-stable-abi211-cu130-x86_64-linux [--results FILE]
        [--tokens 131072] [--hidden 6144] [--device cuda]

A model of one layer, `attn_implementation="m3_sparse"`, random weights and inputs: hidden size, 64/4 heads and 4 index
heads are M3's, its mixture of experts is a small dense MLP. Prefill with a DynamicCache; no padding, no attention_mask.
- select, attend: CUDA events around select_blocks and sparse_attention inside the forward. On the CPU: wall clock.
- scratch: the allocator's peak within each of the two, above what lived before it and without its result.
- forward: the whole model; peak: of one forward without the events, above weights and inputs. Projections, norms, RoPE,
  the cache's concatenations and the MLP are transformers' own.
Checked first: against eager on a prompt of 16 blocks, where every block is selected; then rows of the measured forward
against float64, selections by their scores. The stock path's need is computed from the tensors its source builds.
Needs transformers 5.13 or newer.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import ClassVar

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

import protocol

DIM, BLOCK, TOPK, HEADS, KV_HEADS = 128, 128, 16, 64, 4
REPEATS = 4  # the first is not counted


def model_config(hidden, heads=HEADS, topk=TOPK, initializer_range=0.02):
    from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig

    return MiniMaxM3VLTextConfig(
        vocab_size=256, hidden_size=hidden, intermediate_size=256, dense_intermediate_size=256,
        shared_intermediate_size=256, num_hidden_layers=1, num_attention_heads=heads, num_key_value_heads=KV_HEADS,
        head_dim=DIM, max_position_embeddings=1 << 20, num_local_experts=2, num_experts_per_tok=1,
        index_n_heads=KV_HEADS, index_head_dim=DIM, index_block_size=BLOCK, index_topk_blocks=topk,
        index_local_blocks=1, layer_types=["minimax_m3_sparse"], mlp_layer_types=["dense"], bos_token_id=1,
        eos_token_id=None, pad_token_id=0, initializer_range=initializer_range,
        rope_parameters={"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
    )  # fmt: skip


def make_model(config, implementation, device, dtype):
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLTextModel

    torch.manual_seed(0)
    return MiniMaxM3VLTextModel._from_config(config, attn_implementation=implementation).to(device, dtype).eval()


class Watch:
    """Stands for select_blocks or sparse_attention in the adapter: times each call and keeps the last one's tensors."""

    def __init__(self, function, device):
        self.function, self.cuda = function, device == "cuda"
        self.events, self.scratch, self.call = [], 0, None

    def __call__(self, *args, **options):
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        start = self.mark()
        result = self.function(*args, **options)
        self.events.append((start, self.mark()))
        if self.cuda:
            size = result.numel() * result.element_size()
            self.scratch = max(self.scratch, torch.cuda.max_memory_allocated() - before - size)
        self.call = args, options, result
        return result

    def mark(self):
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self):
        """Median over the calls but the first."""
        between = (lambda a, b: a.elapsed_time(b)) if self.cuda else (lambda a, b: 1000 * (b - a))
        return statistics.median(between(*pair) for pair in self.events[1:])


def check_against_eager(config, device):
    """All of up to 16 blocks are selected, so that a near tie swaps none."""
    x = torch.randn(1, TOPK * BLOCK - 31, config.hidden_size, device=device, dtype=torch.bfloat16)
    results = []
    for name in ("eager", "m3_sparse"):
        model = make_model(config, name, device, torch.bfloat16)
        results.append(model(inputs_embeds=x, use_cache=True).last_hidden_state.double())
    error = float((results[0] - results[1]).norm() / results[0].norm())
    assert error < 1e-2, f"the layer differs from eager by {error:.1e}"
    return error


def check_rows(select, attend, rows):
    """Of the last forward: the chosen blocks are the best ones, and the rows are what they should be."""
    (index_q, index_k, _), _, ids = select.call
    (q, k, v, chosen, _), options, out = attend.call
    assert chosen is ids
    group, scale = q.shape[1] // k.shape[1], options["softmax_scale"]
    for row in rows:
        blocks = row // BLOCK + 1
        keys = index_k[0, : row + 1].double()
        scores = torch.nn.functional.pad(
            index_q[row].double() @ keys.T, (0, blocks * BLOCK - row - 1), value=-torch.inf
        )
        scores = scores.view(-1, blocks, BLOCK).amax(-1)
        scores[:, -1] = torch.inf
        for head in range(k.shape[1]):
            found = ids[row, head][: min(TOPK, blocks)].long()
            assert found.unique().numel() == len(found) and bool((ids[row, head][len(found) :] == -1).all())
            worst = scores[head].topk(len(found)).values[-1]
            margin = 1e-2 * worst.abs().clamp(max=1e30)  # bf16 states, and the only block may be the forced one
            assert bool((scores[head][found] >= worst - margin).all()), "not the best blocks"
            tokens = (found[:, None] * BLOCK + torch.arange(BLOCK, device=q.device)).flatten()
            tokens = tokens[tokens <= row]
            part = slice(head * group, (head + 1) * group)
            logits = q[row, part].double() @ k[0, head, tokens].double().T * scale
            want = torch.softmax(logits, -1) @ v[0, head, tokens].double()
            error = float((out[row, part].double() - want).norm() / want.norm())
            assert error < 5e-3, f"row {row}, head {head}: relative error {error:.1e}"


def measure(m3_sparse, options):
    device = options.device
    config = model_config(options.hidden)
    error = check_against_eager(config, device)
    model = make_model(config, "m3_sparse", device, torch.bfloat16)
    x = torch.randn(1, options.tokens, options.hidden, device=device, dtype=torch.bfloat16)
    adapter = sys.modules[m3_sparse.__name__ + ".transformers"]
    watches = [Watch(getattr(adapter, name), device) for name in ("select_blocks", "sparse_attention")]
    adapter.select_blocks, adapter.sparse_attention = watches
    forward = []
    for _ in range(REPEATS):
        start = watches[0].mark()
        model(inputs_embeds=x, use_cache=True)
        forward.append((start, watches[0].mark()))
    if device == "cuda":
        torch.cuda.synchronize()
    check_rows(*watches, sorted({0, options.tokens // 3, options.tokens - 1}))
    whole = Watch(None, device)
    whole.events = forward
    select, attend = (w.milliseconds() for w in watches)
    scratch = max(w.scratch for w in watches)
    adapter.select_blocks, adapter.sparse_attention = [w.function for w in watches]
    for w in watches:
        w.call = None
    peak = peak_of_forward(model, x) if device == "cuda" else None
    return {"select": select, "attend": attend, "forward": whole.milliseconds(), "scratch": scratch, "peak": peak,
            "error": error}  # fmt: skip


def peak_of_forward(model, x):
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model(inputs_embeds=x, use_cache=True)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def row_of(figures, tokens, bandwidth, rate):
    """Bytes: q, out, K, V, index queries and keys once each. Operations: of visible pairs."""
    size = 2 * DIM * tokens * (2 * HEADS + 2 * KV_HEADS + KV_HEADS + 1)
    pairs = tokens * (tokens + 1) // 2
    short = min(tokens, TOPK * BLOCK)  # rows that see no more than they may select
    seen = short * (short + 1) // 2 + (tokens - short) * (TOPK * BLOCK - BLOCK // 2)
    flops = 2 * DIM * KV_HEADS * pairs + 4 * DIM * HEADS * seen
    time_us = 1000 * (figures["select"] + figures["attend"])
    row = protocol.row(
        bandwidth, time_us, time_us, size, flops, op="layer", impl="ours", dtype="bf16", heads=f"{HEADS}/{KV_HEADS}",
        batch=1, q_len=tokens, kv_len=tokens, selection="indexer", page=None,
    )  # fmt: skip
    return {**row, "limit_ms": round(max(row["limit_ms"], flops / rate / 1e9), 5)}


class SparseLayer(protocol.Benchmark):
    """A prompt of 600 tokens through a layer of 8 heads that selects 2 blocks, in fp32, against eager."""

    seed = 0
    key: ClassVar[dict] = {
        "op": "layer",
        "dtype": "fp32",
        "heads": f"8/{KV_HEADS}",
        "batch": 1,
        "q_len": 600,
        "kv_len": 600,
    }
    key.update(selection="indexer")

    def setup(self) -> None:
        self.kernel.register_transformers("m3_sparse_layer")
        config = model_config(64, heads=8, topk=2, initializer_range=0.2)
        self.models = [make_model(config, name, self.device, torch.float32) for name in ("m3_sparse_layer", "eager")]
        self.x = torch.randn(1, 600, 64, device=self.device)

    def work(self):
        """Of selection and attention, as in the rows; the layer's other parts are in the time, too."""
        return 4 * DIM * 600 * (2 * 8 + 2 * KV_HEADS + KV_HEADS + 1), 2 * DIM * 600 * 300 * (KV_HEADS + 2 * 8)

    def benchmark_prefill(self) -> None:
        with torch.no_grad():
            self.out = self.models[0](inputs_embeds=self.x, use_cache=True).last_hidden_state

    def verify_prefill(self) -> torch.Tensor:
        with torch.no_grad():
            return self.models[1](inputs_embeds=self.x, use_cache=True).last_hidden_state


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variant", required=True)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--hidden", type=int, default=6144)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args()
    m3_sparse = protocol.load(options.variant)
    m3_sparse.register_transformers()
    n = options.tokens
    figures = measure(m3_sparse, options)
    print(
        f"against eager at {TOPK * BLOCK - 31} tokens: relative error {figures['error']:.1e}; rows of {n} tokens right"
    )
    select, attend, scratch = figures["select"], figures["attend"], figures["scratch"] / 2**20
    peak = "not measured" if figures["peak"] is None else f"{figures['peak'] / 2**30:.2f} GiB"
    ours = f"select {select:.2f} + attend {attend:.2f} = {select + attend:.2f} ms, scratch {scratch:.0f} MiB"
    whole = f"forward {figures['forward']:.1f} ms, peak {peak}"
    print(f"layer bf16 {n} tokens, hidden {options.hidden}: {ours}; {whole}")
    scores, mask = 4 * KV_HEADS * n * n / 2**30, 2 * HEADS * n * n / 2**30
    print(f"stock path, computed: fp32 scores [1, {KV_HEADS}, {n}, {n}] {scores:.1f} GiB, "
          f"bf16 mask [1, {HEADS}, {n}, {n}] {mask:.1f} GiB, before any temporary")  # fmt: skip
    if options.results and options.device == "cuda":
        protocol.merge_rows(options.results, [row_of(figures, n, protocol.copy_bandwidth(), protocol.matmul_rate())])


if __name__ == "__main__":
    main()
