"""Tensor parallelism in transformers: each rank projects, caches, selects and attends with its own KV heads alone.

MiniMax-M3's own plan gathers the outputs of q_proj, k_proj and v_proj, so that every rank runs all heads, and leaves the
indexer whole. Where the ranks divide the KV heads, the plan here keeps the shards apart instead: a KV head, its query
heads and its index head stay on one rank, and o_proj's all-reduce is all that attention exchanges. Shards, DTensors and
collectives are those of transformers' parallel styles; only their names in the model's plan change.
"""

from collections.abc import Callable
from typing import Any

STOCK = {
    "q_proj": "colwise_gather_output",
    "k_proj": "colwise_gather_output",
    "v_proj": "colwise_gather_output",
    "o_proj": "rowwise_split_input",
}
BY_HEAD = {
    "q_proj": "colwise",
    "k_proj": "colwise",
    "v_proj": "colwise",
    "o_proj": "rowwise",
    # Whole on every rank, but a rank's gradient comes from its own heads.
    "q_norm": "replicated_with_grad_allreduce",
    "k_norm": "replicated_with_grad_allreduce",
    # Index head i selects for KV head i. The one index key is needed by all ranks: its projection stays whole.
    "indexer.q_proj": "colwise",
}


def plan_by_head(plan: dict[str, str]) -> dict[str, str]:
    """The plan with every attention that has transformers' own entries divided by heads; all else as it was."""
    result = dict(plan)
    for name in plan:
        if not name.endswith(".self_attn.q_proj"):
            continue
        attention = name[: -len("q_proj")]
        if all(plan.get(attention + part) == style for part, style in STOCK.items()):
            result.update({attention + part: style for part, style in BY_HEAD.items()})
    return result


def heads_divide(config: Any, tp_size: int) -> bool:
    """Whether `tp_size` ranks can have whole KV heads, each with its query heads and its index head."""
    kv_heads: int = config.num_key_value_heads
    whole = kv_heads % tp_size == 0 and config.index_n_heads == kv_heads
    return whole and int(config.num_attention_heads) % kv_heads == 0


def patch_distribution(model_class: Any, serves: Callable[[str], bool], owner: object) -> None:
    """Have models of the class that use one of our implementations distributed by heads.

    `maybe_distribute_model` is where transformers knows both the model and the number of ranks and has not yet merged
    the caller's own `tp_plan` into the model's, which therefore still goes first. Versions without it keep their plan:
    all heads on every rank. `owner` tells this copy of the package from others, as in `patch_indexer`.
    """
    previous = found = getattr(model_class, "maybe_distribute_model", None)
    if previous is None:
        return
    while found is not None:
        if getattr(found, "_m3_sparse_attention", None) is owner:
            return
        found = getattr(found, "_m3_sparse_previous", None)

    def maybe_distribute_model(cls: Any, model: Any, distributed_config: Any, mesh_manager: Any) -> Any:
        tp_size = getattr(distributed_config, "tp_size", None) or 1
        config = model.config.get_text_config()
        if tp_size > 1 and serves(config._attn_implementation) and heads_divide(config, tp_size):
            model._tp_plan = plan_by_head(model.tp_plan)
        return previous.__func__(cls, model, distributed_config, mesh_manager)

    replacement: Any = maybe_distribute_model
    replacement._m3_sparse_attention = owner
    replacement._m3_sparse_previous = previous
    model_class.maybe_distribute_model = classmethod(replacement)
