"""Small random MiniMax-M3 models, saved to disk, and the unpadded eager runs that the adapter is compared with.

Block size and head size are the real ones (128), so prompts have to be longer than TOPK blocks before selection drops
anything; hidden sizes, expert counts and depth are as small as the architecture allows.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

BLOCK = 128
TOPK = 2
# Longer than TOPK blocks and no multiple of one: every late query has to leave blocks out.
LONG = 4 * BLOCK + 37
VOCABULARY = 512
IMAGE_TOKEN, VIDEO_TOKEN = 500, 501
# fp32 against fp32, logits of standard deviation 1.6: the order of sums, and RoPE at shifted positions.
TOLERANCE = 1e-4


def text_config(**changes):
    from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig

    layers = changes.pop("num_hidden_layers", 3)
    values = dict(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        dense_intermediate_size=64,
        shared_intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=128,
        max_position_embeddings=8192,
        num_local_experts=2,
        num_experts_per_tok=1,
        index_n_heads=4,
        index_head_dim=128,
        index_block_size=BLOCK,
        index_topk_blocks=TOPK,
        index_local_blocks=1,
        layer_types=["full_attention"] + ["minimax_m3_sparse"] * (layers - 1),
        mlp_layer_types=["dense"] + ["sparse"] * (layers - 1),
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
        # Large enough that attention is far from uniform and logits differ clearly.
        initializer_range=0.2,
        rope_parameters={"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
    )
    values.update(changes)
    return MiniMaxM3VLTextConfig(**values)


def vision_language_config():
    from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import (
        MiniMaxM3VLConfig,
        MiniMaxM3VLVisionConfig,
    )

    vision = MiniMaxM3VLVisionConfig(
        hidden_size=96,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        patch_size=4,
        image_size=64,
        initializer_range=0.2,
    )
    return MiniMaxM3VLConfig(
        text_config=text_config(),
        vision_config=vision,
        projector_hidden_size=64,
        image_token_index=IMAGE_TOKEN,
        video_token_index=VIDEO_TOKEN,
    )


def save_text_model(folder, seed=0, **changes):
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLForCausalLM

    return save(MiniMaxM3VLForCausalLM, text_config(**changes), folder, seed)


def save_vision_language_model(folder, seed=0):
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3SparseForConditionalGeneration

    return save(MiniMaxM3SparseForConditionalGeneration, vision_language_config(), folder, seed)


def save(model_class, config, folder, seed):
    torch.manual_seed(seed)
    model_class._from_config(config, attn_implementation="eager").float().save_pretrained(folder)
    return folder


def load(folder, implementation, model_class=None, **options):
    from transformers import AutoModelForCausalLM

    model_class = model_class or AutoModelForCausalLM
    model = model_class.from_pretrained(folder, attn_implementation=implementation, dtype=torch.float32, **options)
    return model.eval()


def prompt(*shape, seed=1):
    """Random ids without the special ones."""
    return torch.randint(2, IMAGE_TOKEN, shape, generator=torch.Generator().manual_seed(seed))


def left_padded(rows):
    """Batch of 1-D prompts, padded on the left, with mask and positions as `generate` makes them."""
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, len(ids[i]) - len(row) :] = row
        mask[i, len(ids[i]) - len(row) :] = 1
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}


def right_padded(rows):
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, : len(row)], mask[i, : len(row)] = row, 1
    return {"input_ids": ids, "attention_mask": mask}


def greedy(model, tokens=12, **inputs):
    """The new tokens of a greedy `generate`, [B, tokens]."""
    length = inputs["input_ids"].shape[1]
    return model.generate(**inputs, max_new_tokens=tokens, do_sample=False)[:, length:]


def largest_difference(a, b):
    assert a.shape == b.shape
    return (a - b).abs().max().item()


class LargestTensor(TorchDispatchMode):
    """Elements of the largest storage that any operator returned; what happens inside an operator is not seen."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if torch.is_tensor(x):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return out
