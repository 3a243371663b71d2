"""What the adapter doesn't support must not pass silently: an error, or NaN where only a device knows."""

import pytest
import torch
from tiny_models import BLOCK, largest_difference, left_padded, load, prompt, save_text_model

import m3_sparse

m3_sparse.register_transformers()

PACKED = torch.cat([torch.arange(150), torch.arange(200), torch.arange(1)])[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_text_model(tmp_path_factory.mktemp("text"), num_hidden_layers=2)


@pytest.fixture(scope="module")
def model(folder):
    return load(folder, "m3_sparse")


@torch.no_grad()
@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("with_mask", [False, True])
def test_packed_sequences(model, use_cache, with_mask):
    ids = prompt(1, PACKED.shape[1])
    mask = torch.ones_like(ids) if with_mask else None
    with pytest.raises(NotImplementedError, match="packed sequences"):
        model(ids, position_ids=PACKED, attention_mask=mask, use_cache=use_cache)


@torch.no_grad()
def test_packed_in_one_row_of_a_padded_batch(model):
    inputs = left_padded([prompt(300), prompt(200)])
    inputs["position_ids"][1, 200:] -= 70
    with pytest.raises(NotImplementedError, match="those of row 1 restart or jump"):
        model(**inputs)


@torch.no_grad()
def test_packed_at_the_last_token(model):
    positions = torch.arange(300)[None].clone()
    positions[0, -1] = 0
    with pytest.raises(NotImplementedError, match="packed sequences"):
        model(prompt(1, 300), position_ids=positions, attention_mask=torch.ones(1, 300), use_cache=True)


@torch.no_grad()
def test_positions_of_padding_may_be_anything(model):
    inputs = left_padded([prompt(300), prompt(200)])
    expected = model(**inputs).logits
    inputs["position_ids"][1, :100] = torch.randint(0, 50, (100,))
    assert largest_difference(model(**inputs).logits[1, 100:], expected[1, 100:]) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("row", [0, 1])
def test_holes_in_the_mask(model, row):
    ids = prompt(2, 200)
    mask = torch.ones_like(ids)
    mask[row, 90:100] = 0
    with pytest.raises(NotImplementedError, match=f"row {row} has masked tokens between real ones"):
        model(ids, attention_mask=mask)


def test_generating_after_right_padding(model):
    """The padding would end up between prompt and answer."""
    ids = prompt(2, 200)
    mask = torch.ones_like(ids)
    mask[1, 150:] = 0
    with pytest.raises(NotImplementedError, match="row 1 has masked tokens between real ones"):
        model.generate(ids, attention_mask=mask, max_new_tokens=3)


@torch.no_grad()
def test_mask_of_the_new_tokens_only(model):
    ids = prompt(1, 200)
    cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="at least 201 columns .200 cached tokens and 1 new ones., but got 1"):
        model(ids[:, :1], attention_mask=torch.ones(1, 1), past_key_values=cache)


def test_dropout_in_training(folder):
    model = load(folder, "m3_sparse", attention_dropout=0.1)
    with torch.no_grad():
        model(prompt(1, 20))
    with pytest.raises(NotImplementedError, match="expected attention dropout 0, but got 0.1"):
        model.train()(prompt(1, 20))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"index_block_size": 64}, "expected index_block_size 128, .* but the model has 64, 128 and 4"),
        ({"index_head_dim": 64}, "index_head_dim 128 .* but the model has 128, 64 and 4"),
        ({"index_n_heads": 2}, "index_n_heads 4 .one for each KV head., but the model has 128, 128 and 2"),
    ],
)
def test_other_indexers(tmp_path, changes, message):
    model = load(save_text_model(tmp_path, num_hidden_layers=2, **changes), "m3_sparse")
    with pytest.raises(NotImplementedError, match=message):
        model(prompt(1, 20))


def test_other_head_sizes(tmp_path):
    model = load(save_text_model(tmp_path, num_hidden_layers=2, head_dim=64, index_head_dim=64), "m3_sparse")
    with pytest.raises(NotImplementedError, match="expected head_dim 128, but the model has 64"):
        model(prompt(1, 20))


@torch.no_grad()
def test_custom_masks(model):
    ids = prompt(1, 200)
    sliding = torch.ones(200, 200, dtype=torch.bool).tril().triu(-50)[None, None]
    with pytest.raises(NotImplementedError, match="expected the causal mask"):
        model(ids, attention_mask=sliding)
    with pytest.raises(TypeError, match="expected a boolean attention_mask, but got torch.float32"):
        model(ids, attention_mask=torch.zeros(1, 1, 200, 200))
    with pytest.raises(ValueError, match=r"None or \[1, 1, 200, 200\], but got \[1, 8, 200, 200\]"):
        model(ids, attention_mask=sliding.expand(1, 8, 200, 200))


@torch.no_grad()
def test_bidirectional_attention(folder):
    model = load(folder, "m3_sparse")
    model.config.is_causal = False
    with pytest.raises(NotImplementedError, match="custom mask function"):
        model(prompt(1, 20))


def test_other_models():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM._from_config(config, attn_implementation="m3_sparse")
    with pytest.raises(NotImplementedError, match="expected an attention layer of MiniMax-M3, but LlamaAttention has"):
        model(torch.ones(1, 5, dtype=torch.int64))


def test_continuous_batching(model):
    attention = model.model.layers[0].self_attn
    q, k = torch.zeros(1, 8, 4, 128), torch.zeros(1, 4, 4, 128)
    with pytest.raises(NotImplementedError, match="continuous batching"):
        m3_sparse.flash_attn_forward(attention, q, k, k, cache=object())


def test_block_indices_of_the_stock_indexer(model):
    attention = model.model.layers[1].self_attn
    q, k = torch.zeros(1, 8, 4, 128), torch.zeros(1, 4, 4, 128)
    with pytest.raises(NotImplementedError, match="call register_transformers"):
        m3_sparse.flash_attn_forward(attention, q, k, k, block_indices=torch.zeros(1, 4, 4, 1, dtype=torch.int64))


@torch.no_grad()
def test_refused_rows_are_nan_when_compiled(model):
    """Compiled code can't look at the values, so it can't raise; the other rows stay right."""
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    inputs = left_padded([prompt(300), prompt(200)])
    expected = model(**inputs).logits
    packed = {name: x.clone() for name, x in inputs.items()}
    packed["position_ids"][1, 200:] -= 70
    logits = compiled(**packed, use_cache=False).logits
    assert logits[1].isnan().all()
    assert largest_difference(logits[0], expected[0]) < 1e-5
    holed = {name: x.clone() for name, x in inputs.items()}
    holed["attention_mask"][0, BLOCK : BLOCK + 3] = 0
    logits = compiled(**holed, use_cache=False).logits
    assert logits[0].isnan().all()
    assert largest_difference(logits[1, 100:], expected[1, 100:]) < 1e-5
