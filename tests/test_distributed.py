"""Several processes on the CPU (gloo): the adapter under transformers' tensor parallelism, and which heads a rank gets.

The processes are those of distributed_cases.py, which imports once and forks.
"""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import save_vision_language_model, text_config

import m3_sparse

ROOT = Path(__file__).resolve().parent.parent
parallel = importlib.import_module("m3_sparse._transformers_parallel")
m3_sparse.register_transformers()


def run(*arguments, timeout=300):
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, cwd=ROOT, timeout=timeout
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_tensor_parallelism_equals_one_process(variant_folder):
    """Logits, selections, generated tokens (three caches) and gradients; a rank holds its own heads only."""
    pytest.importorskip("accelerate", reason="transformers' tp_plan needs accelerate")
    out = run("tests/distributed_cases.py", variant_folder, "--ranks", 2, 4)
    assert "2 ranks: 2 of 4 KV heads a rank" in out and "4 ranks: 1 of 4 KV heads a rank" in out


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
