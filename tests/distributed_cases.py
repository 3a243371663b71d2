"""Tensor parallelism in transformers and context-parallel decode, several processes over gloo against one process.

    python tests/distributed_cases.py build/torch-cpu --ranks 2
    python tests/distributed_cases.py build/torch-stable-abi211-cu130-x86_64-linux --ranks 2 --device cuda

Run by test_distributed.py, or alone with any transformers on PYTHONPATH. On the CPU it imports once and forks: a process
costs no second start. Every process plays a rank that torchrun would have started, with the same environment variables.
On GPUs (over NCCL) the model also runs in bf16, which is what the compiled kernels take.
"""

import argparse
import os
import socket
import sys
import tempfile
import warnings
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers

TESTS = Path(__file__).resolve().parent
sys.path[:0] = [str(TESTS), str(TESTS.parent / "examples")]

import context_parallel_decode  # noqa: E402
import tiny_models  # noqa: E402
from smoke_transformers import import_package  # noqa: E402

LENGTHS = (tiny_models.LONG, 300)
NEW_TOKENS = 6


class Recorder:
    """Stands for select_blocks in the adapter and keeps what it returned."""

    def __init__(self, adapter):
        self.function, self.selections = adapter.select_blocks, []
        adapter.select_blocks = self

    def __call__(self, *args, **options):
        self.selections.append(self.function(*args, **options))
        return self.selections[-1]


def load(folder, dtype, device, options):
    """With a `tp_plan`, transformers puts each rank's part on its device itself."""
    implementation = {"attn_implementation": "m3_sparse", "dtype": dtype}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **implementation, **options).eval()
    return model if options else model.to(device)


def run_model(folder, recorder, device, **options):
    """What one and several processes must agree on; everything on the CPU."""
    model = load(folder, torch.float32, device, options)
    batch = tiny_models.left_padded([tiny_models.prompt(n, seed=n) for n in LENGTHS])
    batch = {name: x.to(device) for name, x in batch.items()}
    single = {"input_ids": batch["input_ids"][:1]}
    result = {}
    with torch.no_grad():
        recorder.selections.clear()
        output = model(**batch, use_cache=True)
        result["logits"], result["selections"] = output.logits, list(recorder.selections)
        cache = output.past_key_values
        result["cached heads"] = [x.keys.shape[1] for x in cache.layers]
        result["tokens"] = tiny_models.greedy(model, NEW_TOKENS, **single)
        padded = {name: x for name, x in batch.items() if name != "position_ids"}
        result["padded tokens"] = tiny_models.greedy(model, NEW_TOKENS, **padded)
        result["static tokens"] = model.generate(
            **single, max_new_tokens=NEW_TOKENS, do_sample=False, cache_implementation="static", disable_compile=True
        )[:, LENGTHS[0] :]
    loss = model(single["input_ids"], labels=single["input_ids"]).loss
    loss.backward()
    result["loss"] = loss.detach()
    wanted = [name for name, _ in model.named_parameters() if ".layers.1.self_attn." in name]
    parameters = dict(model.named_parameters())
    result["gradients"] = {name: whole(parameters[name].grad) for name in wanted if parameters[name].grad is not None}
    if device.type == "cuda":
        half = load(folder, torch.bfloat16, device, options)
        recorder.selections.clear()
        with torch.no_grad():
            result["half logits"] = half(**batch).logits.float()
        result["half selections"] = list(recorder.selections)
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda x: x.cpu(), result)


def whole(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def device_of(name, rank):
    return torch.device(name, rank) if name == "cuda" else torch.device("cpu")


def prepare(variant):
    """What a process that was not forked has yet to do. Returns the adapter's recorder."""
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", "Passing `tp_plan` directly")
    if "m3_sparse" not in sys.modules:
        import_package(variant)
    return Recorder(sys.modules["m3_sparse.transformers"])


def alone_main(rank, ranks, port, variant, folder, device):
    torch.save(run_model(folder, prepare(variant), device_of(device, 0)), folder / "expected.pt")


def rank_main(rank, ranks, port, variant, folder, device):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    expected = torch.load(folder / "expected.pt")
    found = run_model(folder, prepare(variant), device_of(device, rank), tp_plan="auto")
    compare(found, expected, rank, ranks)
    if device == "cpu":  # on GPUs the example runs by itself
        context_parallel_decode.run(context_parallel_options(variant), torch.device("cpu"), rank, ranks)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def context_parallel_options(variant):
    """Three requests, one of them shorter than a page."""
    return argparse.Namespace(
        device="cpu", variant=Path(variant), requests=3, tokens=4500, steps=3, drafts=2, heads=8, kv_heads=2
    )


def compare(found, expected, rank, ranks):
    kv_heads = expected["cached heads"][0]
    # Older versions run all heads on every rank, as transformers' plan has it.
    by_head = kv_heads % ranks == 0 and hasattr(transformers.PreTrainedModel, "maybe_distribute_model")
    share = kv_heads // ranks if by_head else kv_heads
    first = rank * share if by_head else 0
    assert found["cached heads"] == [share] * len(expected["cached heads"])
    differences = [("logits", found["logits"], expected["logits"]), ("loss", found["loss"], expected["loss"])]
    assert found["gradients"].keys() == expected["gradients"].keys() and len(found["gradients"]) >= 6
    differences += [(name, found["gradients"][name], x) for name, x in expected["gradients"].items()]
    for name, a, b in differences:
        if a.shape != b.shape:  # a plain shard, in versions without DTensors
            (dim,) = [i for i in range(b.dim()) if a.shape[i] != b.shape[i]]
            b = b.chunk(ranks, dim)[rank]
        error = float((a - b).abs().max() / b.abs().max())
        assert error < 1e-4, f"rank {rank}: {name} differs by {error:.1e}"
    for mine, all_heads in zip(found["selections"], expected["selections"], strict=True):
        assert torch.equal(mine, all_heads[:, first : first + share]), f"rank {rank}: another selection"
    for name in ("tokens", "padded tokens", "static tokens"):
        assert torch.equal(found[name], expected[name]), f"rank {rank}: {name} {found[name]}, not {expected[name]}"
    if rank == 0:
        logits = float((found["logits"] - expected["logits"]).abs().max())
        print(f"{ranks} ranks: {share} of {kv_heads} KV heads a rank, logits within {logits:.1e}", flush=True)
    if "half logits" in expected:
        compare_half(found, expected, slice(first, first + share), rank)


def compare_half(found, expected, mine, rank):
    """In bf16 a sum in another order can turn a near tie, and a row with another block is another row."""
    pairs = zip(found["half selections"], expected["half selections"], strict=True)
    equal = torch.cat([(a == b[:, mine]).all(-1).flatten() for a, b in pairs]).float().mean().item()
    a, b = found["half logits"], expected["half logits"]
    error = ((a - b).norm(dim=-1) / b.norm(dim=-1)).nanmedian().item()  # a padding row may be 0
    print(
        f"rank {rank}, bf16: {100 * equal:.2f} % equal selections, median error of a token's logits {error:.1e}",
        flush=True,
    )
    assert equal > 0.95 and error < 0.1


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def spawn(ranks, function, *arguments):
    """As fork, in new processes: CUDA can't be used in a forked one."""
    port, context = free_port(), torch.multiprocessing.get_context("spawn")
    children = [context.Process(target=function, args=(rank, ranks, port, *arguments)) for rank in range(ranks)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    return all(child.exitcode == 0 for child in children)


def fork(ranks, function, *arguments):
    """Run function(rank, ranks, port, ...) in forked processes; True if all end well."""
    port = free_port()
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                function(rank, ranks, port, *arguments)
                status = 0
            except BaseException:  # noqa: BLE001  a forked child ends by its status alone
                import traceback

                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        children.append(child)
    return all(os.waitpid(child, 0)[1] == 0 for child in children)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("variant")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()
    print("transformers", transformers.__version__, flush=True)
    start = fork if options.device == "cpu" else spawn
    if options.device == "cpu":
        import_package(options.variant)
    with tempfile.TemporaryDirectory() as folder:
        folder = tiny_models.save_text_model(Path(folder))
        arguments = (options.variant, folder, options.device)
        for function, ranks in [(alone_main, 1), *((rank_main, n) for n in options.ranks)]:
            if not start(ranks, function, *arguments):
                sys.exit(f"{ranks} ranks: failed")
        print("ok")


if __name__ == "__main__":
    main()
