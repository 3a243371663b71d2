"""Several processes on the CPU (gloo): the adapter under transformers' tensor parallelism, and context-parallel decode.

The processes are those of distributed_cases.py, which imports once and forks.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import save_vision_language_model, text_config

import m3_sparse
from m3_sparse import reference

ROOT = Path(__file__).resolve().parent.parent
parallel = importlib.import_module("m3_sparse._transformers_parallel")
m3_sparse.register_transformers()


def run(*arguments, timeout=300):
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, cwd=ROOT, timeout=timeout
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_several_processes_equal_one(variant_folder):
    """Tensor parallel: logits, selections, generated tokens (three caches) and gradients; a rank holds its own heads
    only. Context parallel: blocks and outputs."""
    pytest.importorskip("accelerate", reason="transformers' tp_plan needs accelerate")
    out = run("tests/distributed_cases.py", variant_folder, "--ranks", 2, 4)
    assert "2 ranks: 2 of 4 KV heads a rank" in out and "4 ranks: 1 of 4 KV heads a rank" in out
    for ranks in (2, 4):
        assert f"{ranks} ranks, 3 requests of up to 4,500 tokens, 3 steps of 2 tokens: same blocks as one" in out


def test_only_whole_kv_heads_are_divided():
    config = text_config()
    assert [n for n in range(1, 9) if parallel.heads_divide(config, n)] == [1, 2, 4]
    assert not parallel.heads_divide(text_config(index_n_heads=2), 2)


def test_plan_of_the_vision_language_model(tmp_path):
    """Its text layers stand deeper in the plan; nothing else changes, and a plan that isn't transformers' stays."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(save_vision_language_model(tmp_path))
    before = model.tp_plan
    after = parallel.plan_by_head(before)
    prefix = "model.language_model.layers.*.self_attn."
    changed = {name for name in after if after[name] != before.get(name)}
    assert changed == {prefix + part for part in parallel.BY_HEAD}
    assert before.keys() <= after.keys() and parallel.plan_by_head(after) == after
    other = {**before, prefix + "o_proj": "rowwise_rep"}
    assert parallel.plan_by_head(other) == other


def test_other_implementations_keep_transformers_plan():
    """The stock indexer can't do with a part of its heads."""
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLForCausalLM

    hook, seen = MiniMaxM3VLForCausalLM.maybe_distribute_model.__func__, []
    assert hook._m3_sparse_attention is m3_sparse.flash_attn_forward
    for implementation in ("sdpa", "m3_sparse"):
        model = MiniMaxM3VLForCausalLM._from_config(text_config(), attn_implementation=implementation)
        # Without a mesh transformers distributes nothing, which leaves the plan to look at.
        MiniMaxM3VLForCausalLM.maybe_distribute_model(model, type("Config", (), {"tp_size": 2})(), None)
        seen.append(model.tp_plan["model.layers.*.self_attn.k_proj"])
    assert seen == ["colwise_gather_output", "colwise"]


def example(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["ties", "infinite", "equal"])
def test_candidates_of_all_ranks_merge_to_the_selection(ranks, kind):
    """Exactly, with ties across ranks, scores of +-inf and +-0, and rows with fewer blocks than ranks."""
    cp, blocks = example("context_parallel_decode"), 61
    generator = torch.Generator().manual_seed(7)
    scores = torch.randint(-2, 3, (60, 2, blocks), generator=generator).float()
    if kind == "infinite":
        scores[scores == 2], scores[scores == -2] = torch.inf, -torch.inf
        scores[scores == 0] = -0.0
        scores[:, :, ::3].abs_()
    elif kind == "equal":
        scores.zero_()
    counts = torch.arange(60) + 1
    expected = reference.select_from_scores(scores, counts, 16, 1, 0)
    ids, found = [], []
    for rank in range(ranks):
        own = scores[:, :, rank::ranks]
        chosen = reference.select_from_scores(own, (counts - rank + ranks - 1) // ranks, 16, 0, 0)
        ids.append(torch.where(chosen < 0, -1, chosen * ranks + rank))
        found.append(own.gather(-1, chosen.clamp(min=0).long()))
    # Ranks in any order: the rules are about ids and scores.
    merged = cp.best_of_all(torch.cat(ids[::-1], -1), torch.cat(found[::-1], -1), counts - 1)
    assert merged.dtype == torch.int32 and torch.equal(merged, expected)


def test_context_parallel_decode_by_torchrun(variant_folder):
    """As documented; test_several_processes_equal_one runs it too, with two and four ranks."""
    command = ["-m", "torch.distributed.run", "--nproc-per-node", 2, "examples/context_parallel_decode.py"]
    out = run(*command, "--variant", variant_folder, "--heads", 8, "--kv-heads", 2, "--tokens", 3000, "--steps", 2)
    assert "2 ranks, 2 requests of up to 3,000 tokens" in out and "same blocks as one" in out
