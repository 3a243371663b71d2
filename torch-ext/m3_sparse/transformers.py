"""`attn_implementation="m3_sparse"` for MiniMax-M3 in Hugging Face transformers.

    import m3_sparse
    m3_sparse.register_transformers()        # done by the import itself where transformers is already loaded
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="m3_sparse")

Three hooks: an attention function, a mask function (see `_transformers_rows.py`), and the indexer's forward, which
under this implementation only projects: selection runs beside attention, where padding and offsets are known, and so
never builds scores of [queries, keys]. Under any other implementation the indexer's forward is the one found before.
Under tensor parallelism a fourth divides the heads among the ranks (`_transformers_parallel.py`).

transformers is imported inside functions only.
"""

import functools
import re
import sys
from typing import Any, NamedTuple, Optional

import torch

from ._arguments import needs_grad
from ._transformers_cache import read_states
from ._transformers_parallel import patch_distribution
from ._transformers_rows import check_rows, compact_mask, read_rows
from .attention import dense_attention, sparse_attention
from .selection import select_blocks

OLDEST_VERSION = (5, 13, 0)
SUPPORTED = "transformers 5.13.0 or newer, with transformers.models.minimax_m3_vl"
BLOCK = 128

# transformers' hub loader binds `flash_attn_forward` of a package that has this attribute too.
supports_flash_attn = True


class IndexStates(NamedTuple):
    """What the indexer hands to the attention function in place of block indices."""

    query: torch.Tensor  # [B, Hi, Sq, 128]
    key: torch.Tensor  # [B, 1, Sk, 128]


def register_transformers(name: str = "m3_sparse") -> None:
    """Make `attn_implementation=name` available to MiniMax-M3 models of the loaded transformers.

    May be called again, also with another name. Importing the package calls it when transformers is loaded already.

    Raises:
        TypeError, ValueError: `name` is no string, or transformers would take it for something else.
        ModuleNotFoundError: transformers is not installed.
        NotImplementedError: this version of transformers is not supported.
    """
    check_name(name)
    modeling = load_modeling()
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, flash_attn_forward)
    # Without this one transformers passes no mask at all, silently, and padding would be ignored.
    AttentionMaskInterface.register(name, compact_mask)
    patch_indexer(modeling.MiniMaxM3VLIndexer)
    patch_distribution(modeling.MiniMaxM3VLPreTrainedModel, serves, flash_attn_forward)


def register_if_loaded() -> None:
    """The import's own registration: nothing happens without transformers, or with one that is not supported."""
    if "transformers" not in sys.modules:
        return
    try:
        register_transformers()
    except (ImportError, NotImplementedError):
        # Importing the package must not depend on another one's version; calling register_transformers() tells why.
        return


def flash_attn_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Optional[torch.Tensor] = None,
    dropout: float = 0.0,
    scaling: Optional[float] = None,
    block_indices: Optional[IndexStates] = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: query [B, Hq, Sq, 128], key and value [B, Hkv, Sk, 128].

    Sparse layers pass IndexStates as `block_indices` and attend over the blocks selected from them; dense layers pass
    None and attend over everything before. Modules without an `indexer` attribute (the vision tower) go to sdpa.

    Returns (out [B, Sq, Hq, 128], None). A row that is refused by a value on an accelerator, or under torch.compile,
    comes out as NaN instead of raising (docs/transformers.md).
    """
    if not hasattr(module, "indexer"):
        return delegate_to_sdpa(module, query, key, value, attention_mask, dropout, scaling, kwargs)
    check_call(module, query, key, dropout, block_indices, kwargs)
    given = query.dtype
    query, key, value = one_dtype(query, key, value)
    position_ids = kwargs.get("position_ids")
    batch, heads, q_length, dim = query.shape
    rows = read_rows(attention_mask, position_ids, query, key)
    # Once per forward is enough: all layers see the same mask and positions, and NaN reaches them all.
    refused = check_rows(rows, attention_mask, position_ids, q_length) if module.layer_idx == 0 else None
    lengths: dict[str, Any] = {
        "cu_seqlens_q": torch.arange(batch + 1, dtype=torch.int32, device=query.device) * q_length,
        "seqused_k": rows.kv_lengths(q_length),
    }
    (keys, values), block_table, leftpad = read_states((key, value), rows.pad, needs_grad(query, key, value))
    options: dict[str, Any] = {**lengths, "softmax_scale": scaling, "leftpad_k": leftpad}
    out: Any
    if block_indices is None:
        out = dense_attention(tokens(query), keys, values, block_table, **options)
    else:
        selected = select(module.indexer, block_indices, rows.pad, lengths)
        out = sparse_attention(tokens(query), keys, values, selected, block_table, **options)
    out = out.view(batch, q_length, heads, dim).to(given)
    if refused is not None:
        out = out.masked_fill(refused[:, None, None, None], float("nan"))
    return out, None


def select(indexer: Any, states: IndexStates, pad: Optional[torch.Tensor], lengths: dict[str, Any]) -> torch.Tensor:
    """Selected blocks [B * Sq, Hi, topk], counted from each row's first real token."""
    query, key = one_dtype(states.query.detach(), states.key.detach())
    (keys,), block_table, leftpad = read_states((key,), pad, False)
    return select_blocks(  # type: ignore[return-value]  # a tensor without return_scores
        tokens(query),
        keys[:, 0],
        block_table,
        leftpad_k=leftpad,
        topk=indexer.topk_blocks,
        local_blocks=indexer.local_blocks,
        **lengths,
    )


def tokens(x: torch.Tensor) -> torch.Tensor:
    """[B, heads, S, D] -> [B * S, heads, D]."""
    return x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3])


def one_dtype(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """In the widest dtype among them, as transformers' caches make keys and values too. Under autocast, queries and keys
    leave RoPE in fp32, and values a projection in 16 bits.
    """
    dtype = functools.reduce(torch.promote_types, [x.dtype for x in tensors])
    return tuple(x.to(dtype) for x in tensors)


def delegate_to_sdpa(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Optional[torch.Tensor],
    dropout: float,
    scaling: Optional[float],
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if attention_mask is not None and attention_mask.dtype == torch.int64:
        raise NotImplementedError(
            f"m3_sparse: expected an attention layer of MiniMax-M3, but {type(module).__name__} has no `indexer`"
        )
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)


def check_call(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    dropout: float,
    block_indices: Optional[IndexStates],
    kwargs: dict[str, Any],
) -> None:
    if dropout:
        raise NotImplementedError(f"m3_sparse: expected attention dropout 0, but got {dropout}")
    if kwargs.get("cache") is not None:
        raise NotImplementedError("m3_sparse: continuous batching (a paged `cache` argument) is not supported")
    if query.shape[2] > key.shape[2]:
        raise ValueError(f"m3_sparse: expected at least as many keys as queries ({query.shape[2]}), got {key.shape[2]}")
    if query.shape[3] != BLOCK:
        raise NotImplementedError(f"m3_sparse: expected head_dim {BLOCK}, but the model has {query.shape[3]}")
    if block_indices is None:
        return
    if torch.is_tensor(block_indices):
        raise NotImplementedError(
            "m3_sparse: expected the package's own indexer, but block indices came ready; call register_transformers()"
        )
    indexer, kv_heads = module.indexer, key.shape[1]
    # Under tensor parallelism both counts are this rank's.
    found = (indexer.block_size, indexer.head_dim, block_indices.query.shape[1])
    if found != (BLOCK, BLOCK, kv_heads):
        raise NotImplementedError(
            f"m3_sparse: expected index_block_size {BLOCK}, index_head_dim {BLOCK} and index_n_heads {kv_heads} "
            f"(one for each KV head), but the model has {found[0]}, {found[1]} and {found[2]}"
        )


def project_index(
    self: Any, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], cache: Any
) -> IndexStates:
    """MiniMaxM3VLIndexer.forward up to the scores: projections, norms, RoPE and the index-key cache."""
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import apply_rotary_pos_emb

    batch, length, _ = hidden_states.shape
    # Only the order of scores matters afterwards, so no gradient passes here, as in transformers itself.
    with torch.no_grad():
        query = self.q_norm(self.q_proj(hidden_states).view(batch, length, -1, self.head_dim)).transpose(1, 2)
        key = self.k_norm(self.k_proj(hidden_states).view(batch, length, 1, self.head_dim)).transpose(1, 2)
        cos, sin = position_embeddings
        query, key = apply_rotary_pos_emb(query, key, cos[..., : self.head_dim], sin[..., : self.head_dim])
        if cache is not None:
            key = cache.layers[self.layer_idx].update_index(key)
    return IndexStates(query, key)


def patch_indexer(indexer_class: Any) -> None:
    """Replace the class's forward by one that serves our names and otherwise calls what it found.

    Two copies of this package (two versions, or one loaded from the Hub beside an installed one) chain in this way,
    and each serves the names that are bound to its own attention function.
    """
    previous = found = indexer_class.forward
    while found is not None:
        if getattr(found, "_m3_sparse_attention", None) is flash_attn_forward:
            return
        found = getattr(found, "_m3_sparse_previous", None)

    def forward(self: Any, hidden_states: torch.Tensor, position_embeddings: Any, *args: Any, **kwargs: Any) -> Any:
        if not serves(self.config._attn_implementation):
            return previous(self, hidden_states, position_embeddings, *args, **kwargs)
        # Third and positional in every supported version; its name changed in 5.24.
        cache = args[0] if args else kwargs.get("cache", kwargs.get("past_key_values"))
        return project_index(self, hidden_states, position_embeddings, cache)

    replacement: Any = forward
    replacement._m3_sparse_attention = flash_attn_forward
    replacement._m3_sparse_previous = previous
    indexer_class.forward = replacement


def serves(name: str) -> bool:
    """Whether transformers binds this name, which may be a Hub repository's, to this copy's attention function."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS._global_mapping.get(name) is flash_attn_forward


def check_name(name: str) -> None:
    if not isinstance(name, str):
        raise TypeError(f"m3_sparse: expected name to be a string, but got {type(name).__name__}")
    # transformers looks for these in names: "flash" becomes another kernel, "org/name" is fetched from the Hub.
    for part in ("flash", "sdpa", "flex", "eager", "paged", "/", "|", ":", "@"):
        if part in name:
            raise ValueError(f"m3_sparse: expected a name without {part!r}, but got {name!r}")
    if not name:
        raise ValueError("m3_sparse: expected a name, but got an empty string")


def load_modeling() -> Any:
    """transformers' module with the MiniMax-M3 classes, if this version is supported."""
    import transformers

    version = transformers.__version__
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:3])
    if numbers < OLDEST_VERSION:
        raise NotImplementedError(f"m3_sparse: expected {SUPPORTED}, but found transformers {version}")
    try:
        from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as modeling

        for name in ("MiniMaxM3VLIndexer", "MiniMaxM3VLPreTrainedModel", "apply_rotary_pos_emb"):
            getattr(modeling, name)
    except (ImportError, AttributeError) as error:
        raise NotImplementedError(
            f"m3_sparse: expected {SUPPORTED}, but transformers {version} lacks part of it: {error}"
        ) from error
    return modeling
