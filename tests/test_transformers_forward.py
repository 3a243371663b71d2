"""One forward pass of small MiniMax-M3 models under "m3_sparse" against the unpadded eager run of each row."""

import importlib

import pytest
import torch
from tiny_models import (
    BLOCK,
    IMAGE_TOKEN,
    LONG,
    TOLERANCE,
    TOPK,
    LargestTensor,
    largest_difference,
    left_padded,
    load,
    prompt,
    right_padded,
    save_text_model,
    save_vision_language_model,
)

import m3_sparse

m3_sparse.register_transformers()
adapter = importlib.import_module("m3_sparse.transformers")

# Lengths of a ragged batch: selective, less than topk blocks, less than one block.
RAGGED = (LONG, BLOCK + 11, BLOCK - 40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_text_model(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def eager(folder):
    return load(folder, "eager")


@pytest.fixture(scope="module")
def model(folder):
    return load(folder, "m3_sparse")


@pytest.fixture(scope="module")
def ragged(eager):
    rows = [prompt(n, seed=n) for n in RAGGED]
    with torch.no_grad():
        return rows, [eager(row[None]).logits[0] for row in rows]


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 7, BLOCK - 1, BLOCK, BLOCK + 1, TOPK * BLOCK, 4 * BLOCK, LONG])
@pytest.mark.parametrize("batch", [1, 2])
def test_prefill(eager, model, batch, length):
    ids = prompt(batch, length)
    for use_cache in (False, True):
        found = model(ids, use_cache=use_cache).logits
        assert largest_difference(found, eager(ids, use_cache=use_cache).logits) < TOLERANCE


@torch.no_grad()
def test_selection_matters(eager, folder):
    """Otherwise every other test here would pass with plain causal attention."""
    everything = load(folder, "eager")
    for layer in everything.model.layers[1:]:
        layer.self_attn.indexer.topk_blocks = 16
    ids = prompt(1, LONG)
    assert largest_difference(eager(ids).logits, everything(ids).logits) > 1.0


@torch.no_grad()
def test_layers_go_through_the_package(model, monkeypatch):
    calls = []
    for name in ("select_blocks", "sparse_attention", "dense_attention"):
        function = getattr(adapter, name)
        monkeypatch.setattr(adapter, name, lambda *a, _f=function, _n=name, **k: calls.append(_n) or _f(*a, **k))
    model(prompt(1, 30))
    assert calls == ["dense_attention", *["select_blocks", "sparse_attention"] * 2]


@torch.no_grad()
@pytest.mark.parametrize("with_positions", [True, False])
def test_left_padding(model, ragged, with_positions):
    rows, expected = ragged
    inputs = left_padded(rows)
    if not with_positions:
        del inputs["position_ids"]
    logits = model(**inputs).logits
    for found, reference in zip(logits, expected):
        assert largest_difference(found[-len(reference) :], reference) < TOLERANCE


@torch.no_grad()
def test_left_padding_of_every_row(model, ragged):
    rows, expected = ragged
    inputs = {name: torch.nn.functional.pad(x, (BLOCK + 5, 0)) for name, x in left_padded(rows).items()}
    logits = model(**inputs).logits
    for found, reference in zip(logits, expected):
        assert largest_difference(found[-len(reference) :], reference) < TOLERANCE


@torch.no_grad()
def test_right_padding(model, ragged):
    rows, expected = ragged
    logits = model(**right_padded(rows)).logits
    for found, reference in zip(logits, expected):
        assert largest_difference(found[: len(reference)], reference) < TOLERANCE


@torch.no_grad()
def test_padding_on_both_sides(model, ragged):
    rows, expected = ragged
    inputs = {name: torch.nn.functional.pad(x, (70, 0)) for name, x in right_padded(rows).items()}
    logits = model(**inputs).logits
    for found, reference in zip(logits, expected):
        assert largest_difference(found[70 : 70 + len(reference)], reference) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("start", [LONG - 4, BLOCK - 2, 3 * BLOCK - 2])
def test_cached_decode(eager, model, start):
    ids = prompt(2, start + 4)
    expected = eager(ids).logits
    cache = model(ids[:, :start], use_cache=True).past_key_values
    for i in range(start, start + 4):
        found = model(ids[:, i : i + 1], past_key_values=cache).logits[:, 0]
        assert largest_difference(found, expected[:, i]) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("chunk", [BLOCK, 250])
def test_chunked_prefill_with_left_padding(model, ragged, chunk):
    rows, expected = ragged
    inputs = left_padded(rows)
    cache, logits = None, []
    for start in range(0, LONG, chunk):
        part = {name: x[:, start : start + chunk] for name, x in inputs.items()}
        part["attention_mask"] = inputs["attention_mask"][:, : start + chunk]
        out = model(**part, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logits.append(out.logits)
    for found, reference in zip(torch.cat(logits, 1), expected):
        assert largest_difference(found[-len(reference) :], reference) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("size", [LONG, LONG + 20, 5 * BLOCK])
def test_static_cache(eager, model, size):
    from transformers import StaticCache

    ids = prompt(2, LONG)
    expected = eager(ids).logits
    cache = StaticCache(config=model.config, max_cache_len=size)
    first = model(ids[:, :400], past_key_values=cache).logits
    second = model(ids[:, 400:-1], past_key_values=cache).logits
    last = model(ids[:, -1:], past_key_values=cache).logits
    assert largest_difference(torch.cat([first, second, last], 1), expected) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_caches_go_in_without_copies(model, monkeypatch, kind):
    """Keys, values and index keys that the public functions get lie in the cache's own memory: a prefill, a chunk of a
    padded batch and a decode step."""
    from transformers import DynamicCache, StaticCache

    static = kind == "static"
    cache = StaticCache(config=model.config, max_cache_len=LONG + 9) if static else DynamicCache(config=model.config)
    seen = []

    def watch(name, first, last):
        function = getattr(adapter, name)

        def watched(*args, **options):
            seen.extend(x.untyped_storage().data_ptr() for x in args[first:last])
            return function(*args, **options)

        monkeypatch.setattr(adapter, name, watched)

    watch("select_blocks", 1, 2)
    watch("sparse_attention", 1, 3)
    watch("dense_attention", 1, 3)
    inputs = left_padded([prompt(LONG), prompt(LONG - 50)])
    for start, end in ((0, 300), (300, LONG - 1), (LONG - 1, LONG)):
        del seen[:]
        ids = inputs["input_ids"][:, start:end]
        model(ids, attention_mask=inputs["attention_mask"][:, :end], past_key_values=cache)
        held = [
            x for layer in cache.layers for x in vars(layer).values() if isinstance(x, torch.Tensor) and x.dim() > 2
        ]
        assert len(seen) == 2 + 3 + 3 and set(seen) <= {x.untyped_storage().data_ptr() for x in held}


@torch.no_grad()
def test_all_dense_and_all_sparse_layers(tmp_path):
    for kind in ("full_attention", "minimax_m3_sparse"):
        folder = save_text_model(tmp_path / kind, num_hidden_layers=2, layer_types=[kind] * 2)
        ids = prompt(1, LONG)
        found = load(folder, "m3_sparse")(ids).logits
        assert largest_difference(found, load(folder, "eager")(ids).logits) < TOLERANCE


@torch.no_grad()
def test_legacy_sparse_attention_config(tmp_path):
    """The form in which the published checkpoint states its layers."""
    legacy = {"sparse_topk_blocks": 2, "sparse_local_block": 2, "sparse_attention_freq": [0, 1, 1]}
    folder = save_text_model(tmp_path, layer_types=None, sparse_attention_config=legacy)
    model = load(folder, "m3_sparse")
    assert model.config.layer_types == ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"]
    indexer = model.model.layers[1].self_attn.indexer
    assert (indexer.topk_blocks, indexer.local_blocks) == (2, 2)
    ids = prompt(1, LONG)
    assert largest_difference(model(ids).logits, load(folder, "eager")(ids).logits) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True])
def test_nothing_quadratic_in_the_prompt(model, padded):
    length = 2000
    inputs = {"input_ids": prompt(1, length)}
    if padded:
        inputs = left_padded([prompt(length), prompt(length - 50)])
    with LargestTensor() as largest:
        model(**inputs, logits_to_keep=1)
    assert largest.elements < length * length * len(inputs["input_ids"])


@pytest.mark.parametrize("mode", ["plain", "checkpointing", "compiled"])
def test_gradients(folder, tmp_path, mode):
    ids = torch.stack([prompt(2 * BLOCK + 9), prompt(2 * BLOCK + 9, seed=2)])
    if mode == "compiled":
        # transformers' mixture of experts has no backward pass that compiles.
        folder = save_text_model(tmp_path, num_hidden_layers=2, mlp_layer_types=["dense"] * 2)
    losses, gradients = [], []
    for implementation in ("eager", "m3_sparse"):
        model = run = load(folder, implementation).train()
        if mode == "checkpointing":
            model.gradient_checkpointing_enable()
        if mode == "compiled" and implementation == "m3_sparse":
            torch._dynamo.reset()
            run = torch.compile(model, fullgraph=True, backend="aot_eager")
        loss = run(ids, labels=ids, use_cache=False).loss
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for name, expected in gradients[0].items():
        found = gradients[1][name]
        if "indexer" in name:
            assert expected is None and found is None
        else:
            assert largest_difference(found, expected) <= 1e-4 * expected.abs().max().item() + 1e-7, name


def test_gradients_with_left_padding(folder):
    row = prompt(2 * BLOCK + 9)
    gradients = []
    for implementation, inputs, pads in (
        ("eager", {"input_ids": row[None]}, 0),
        ("m3_sparse", {name: torch.nn.functional.pad(x, (60, 0)) for name, x in left_padded([row]).items()}, 60),
    ):
        model = load(folder, implementation)
        labels = inputs["input_ids"].clone()
        labels[:, : pads + 1] = -100
        model(**inputs, labels=labels).loss.backward()
        gradients.append(model.model.layers[1].self_attn.k_proj.weight.grad)
    assert largest_difference(*gradients) < 1e-4 * gradients[0].abs().max()


@torch.no_grad()
@pytest.mark.parametrize("use_cache", [False, True])
def test_autocast(eager, model, use_cache):
    """Values leave their projection in 16 bits, queries and keys leave RoPE in fp32; a cache makes both fp32."""
    ids = prompt(2, LONG)
    with torch.autocast("cpu", torch.float16):
        found, expected = model(ids, use_cache=use_cache).logits, eager(ids, use_cache=use_cache).logits
    exact = eager(ids).logits
    # As far from fp32 as eager is, whose selections may differ in a row.
    distance = (found - exact).abs().median()
    assert 0 < distance < 2 * (expected - exact).abs().median()


def test_training_under_autocast_with_checkpointing(folder):
    """Checkpointing does without a cache."""
    gradients = []
    for implementation in ("eager", "m3_sparse"):
        model = load(folder, implementation).train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        ids = prompt(1, TOPK * BLOCK)  # all blocks are chosen
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(ids, labels=ids).loss
        loss.backward()
        gradients.append(model.model.layers[1].self_attn.v_proj.weight.grad)
    assert (gradients[0] - gradients[1]).norm() < 0.1 * gradients[0].norm()


@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True])
def test_fullgraph_compile(tmp_path, padded):
    folder = save_text_model(tmp_path, num_hidden_layers=2)
    eager = load(folder, "eager")
    torch._dynamo.reset()
    compiled = torch.compile(load(folder, "m3_sparse"), fullgraph=True, backend="aot_eager")
    rows = [prompt(LONG), prompt(2 * BLOCK if padded else LONG, seed=2)]
    inputs = left_padded(rows) if padded else {"input_ids": torch.stack(rows)}
    for row, found in zip(rows, compiled(**inputs, use_cache=False).logits):
        assert largest_difference(found[-len(row) :], eager(row[None]).logits[0]) < TOLERANCE


@torch.no_grad()
def test_vision_language_model_with_two_images(tmp_path):
    from transformers import AutoModelForImageTextToText

    folder = save_vision_language_model(tmp_path)
    grid = torch.tensor([[1, 8, 8], [1, 4, 8]])
    patches = grid.prod(-1)
    ids = prompt(1, LONG)
    # A merged image token stands for 2 x 2 patches; text before, between and after.
    ids[0, 5 : 5 + patches[0] // 4] = IMAGE_TOKEN
    ids[0, 400 : 400 + patches[1] // 4] = IMAGE_TOKEN
    pixels = torch.randn(int(patches.sum()), 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(3))
    inputs = {"input_ids": ids, "pixel_values": pixels, "image_grid_thw": grid}
    expected = load(folder, "eager", AutoModelForImageTextToText)(**inputs).logits
    choices = ("m3_sparse", {"text_config": "m3_sparse", "vision_config": "sdpa"})
    for choice in choices:
        model = load(folder, choice, AutoModelForImageTextToText)
        assert model.config.text_config._attn_implementation == "m3_sparse"
        assert largest_difference(model(**inputs).logits, expected) < TOLERANCE
    without_images = model(input_ids=torch.where(ids == IMAGE_TOKEN, 7, ids)).logits
    assert largest_difference(without_images, expected) > 0.1
