"""`generate` under "m3_sparse": the tokens must be those of the unpadded eager run of each row."""

import pytest
import torch
from tiny_models import BLOCK, LONG, greedy, left_padded, load, prompt, save_text_model, save_vision_language_model

import m3_sparse

m3_sparse.register_transformers()

TOKENS = 8
# The second row crosses a block boundary while it generates.
LENGTHS = (LONG, 3 * BLOCK - 3, 20)

MODES = {
    "dynamic": {},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "chunked": {"prefill_chunk_size": 250},
}


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
def expected(eager):
    rows = [prompt(n, seed=n) for n in LENGTHS]
    return rows, [greedy(eager, TOKENS, input_ids=row[None])[0] for row in rows]


@pytest.mark.parametrize("mode", MODES)
def test_single_prompt(model, expected, mode):
    rows, tokens = expected
    found = greedy(model, TOKENS, input_ids=rows[0][None], **MODES[mode])
    assert torch.equal(found[0], tokens[0])


@pytest.mark.parametrize("mode", MODES)
def test_left_padded_batch(model, expected, mode):
    rows, tokens = expected
    inputs = left_padded(rows)
    del inputs["position_ids"]
    found = greedy(model, TOKENS, **inputs, **MODES[mode])
    assert torch.equal(found, torch.stack(tokens))


@pytest.mark.parametrize("padded", [False, True])
def test_compiled_static_cache(tmp_path, padded):
    from transformers import CompileConfig

    folder = save_text_model(tmp_path, num_hidden_layers=2)
    model, eager = load(folder, "m3_sparse"), load(folder, "eager")
    torch._dynamo.reset()
    config = CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    # transformers compiles decoding on GPUs only, unless told otherwise.
    config._compile_all_devices = True
    rows = [prompt(n, seed=n) for n in (LENGTHS if padded else LENGTHS[:1])]
    inputs = left_padded(rows)
    del inputs["position_ids"]
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    found = greedy(model, TOKENS, **inputs, cache_implementation="static", compile_config=config)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > before
    for tokens, row in zip(found, rows):
        assert torch.equal(tokens, greedy(eager, TOKENS, input_ids=row[None])[0])


@pytest.mark.parametrize("mode", ["dynamic", "static"])
def test_beams(eager, model, mode):
    ids = prompt(1, LONG, seed=5)
    options = {"num_beams": 3, "max_new_tokens": 6, "do_sample": False}
    expected = eager.generate(ids, **options)
    assert torch.equal(model.generate(ids, **options, **MODES[mode]), expected)


def test_beams_of_a_left_padded_batch(eager, model, expected):
    rows = expected[0]
    options = {"num_beams": 2, "max_new_tokens": 6, "do_sample": False}
    inputs = left_padded(rows[:2])
    del inputs["position_ids"]
    found = model.generate(**inputs, **options)[:, -6:]
    for row, tokens in zip(rows, found):
        assert torch.equal(eager.generate(row[None], **options)[0, -6:], tokens)


def test_assisted_generation(eager, model, tmp_path):
    ids = prompt(1, LONG, seed=6)
    expected = greedy(eager, 12, input_ids=ids)
    # The model assisting itself: every guess is right, so whole chunks are verified and kept.
    assert torch.equal(greedy(model, 12, input_ids=ids, assistant_model=model), expected)
    # A stranger: guesses are wrong, so the cache is cropped.
    stranger = load(save_text_model(tmp_path, seed=9), "m3_sparse")
    assert torch.equal(greedy(model, 12, input_ids=ids, assistant_model=stranger), expected)


def test_prompt_lookup(eager, model):
    ids = prompt(1, 60, seed=7).repeat(1, 9)
    expected = greedy(eager, 12, input_ids=ids)
    assert torch.equal(greedy(model, 12, input_ids=ids, prompt_lookup_num_tokens=5), expected)


def test_continuing_a_conversation(eager, model):
    """A second prompt on top of the cache that the first `generate` left."""
    first, second = prompt(1, 500, seed=8), prompt(1, 77, seed=9)
    out = model.generate(first, max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
    ids = torch.cat([out.sequences, second], 1)
    found = model.generate(ids, past_key_values=out.past_key_values, max_new_tokens=5, do_sample=False)
    assert torch.equal(found, eager.generate(ids, max_new_tokens=5, do_sample=False))


def test_changing_the_implementation_of_a_loaded_model(folder, eager):
    model = load(folder, "sdpa")
    ids = prompt(1, LONG, seed=10)
    expected = greedy(eager, 5, input_ids=ids)
    for name in ("m3_sparse", "eager", "m3_sparse", "sdpa"):
        model.set_attn_implementation(name)
        assert model.config._attn_implementation == name
        assert torch.equal(greedy(model, 5, input_ids=ids), expected)


@pytest.mark.parametrize("mode", ["dynamic", "static"])
def test_vision_language_model(tmp_path, mode):
    from tiny_models import IMAGE_TOKEN
    from transformers import AutoModelForImageTextToText

    folder = save_vision_language_model(tmp_path)
    grid = torch.tensor([[1, 4, 4], [1, 4, 8]])
    patches = grid.prod(-1)
    ids = prompt(1, 500, seed=11)
    ids[0, 3 : 3 + patches[0] // 4] = IMAGE_TOKEN
    ids[0, 300 : 300 + patches[1] // 4] = IMAGE_TOKEN
    pixels = torch.randn(int(patches.sum()), 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(4))
    inputs = {"input_ids": ids, "pixel_values": pixels, "image_grid_thw": grid}
    expected = greedy(load(folder, "eager", AutoModelForImageTextToText), 5, **inputs)
    choice = {"text_config": "m3_sparse", "vision_config": "sdpa"}
    model = load(folder, choice, AutoModelForImageTextToText)
    assert torch.equal(greedy(model, 5, **inputs, **MODES[mode]), expected)
