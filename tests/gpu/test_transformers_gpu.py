"""The transformers adapter on a GPU: tiny random models, against unpadded eager on the same device."""

import pytest
import torch

pytest.importorskip("transformers.models.minimax_m3_vl")

import tiny_models

import m3_sparse

m3_sparse.register_transformers()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tiny_models.save_text_model(tmp_path_factory.mktemp("model"))
    return [tiny_models.load(folder, name).cuda() for name in ("eager", "m3_sparse")]


def test_prefill(models):
    ids = tiny_models.prompt(2, tiny_models.LONG).cuda()
    with torch.no_grad():
        want, got = (model(input_ids=ids).logits for model in models)
    assert tiny_models.largest_difference(want, got) < 10 * tiny_models.TOLERANCE


def test_greedy_generation(models):
    ids = tiny_models.prompt(1, tiny_models.LONG).cuda()
    want, got = (tiny_models.greedy(model, input_ids=ids) for model in models)
    assert torch.equal(want, got)


def test_left_padding_equals_the_rows_alone(models):
    eager, ours = models
    rows = [tiny_models.prompt(tiny_models.LONG, seed=3), tiny_models.prompt(150, seed=4)]
    inputs = {name: x.cuda() for name, x in tiny_models.left_padded(rows).items()}
    inputs.pop("position_ids")
    got = tiny_models.greedy(ours, **inputs)
    for row, tokens in zip(rows, got):
        assert torch.equal(tokens, tiny_models.greedy(eager, input_ids=row[None].cuda())[0])


def test_static_cache(models):
    ids = tiny_models.prompt(1, tiny_models.LONG).cuda()
    inputs = {"input_ids": ids, "max_new_tokens": 12, "do_sample": False}
    want = models[0].generate(**inputs)
    got = models[1].generate(**inputs, cache_implementation="static", disable_compile=True)
    assert torch.equal(want, got)


def test_a_decode_step_does_not_synchronise(models):
    ids = tiny_models.prompt(1, tiny_models.LONG).cuda()
    model = models[1]
    with torch.no_grad():
        cache = model(input_ids=ids, use_cache=True).past_key_values
        step = {"input_ids": ids[:, :1], "past_key_values": cache, "use_cache": True}
        step["position_ids"] = torch.tensor([[tiny_models.LONG]], device="cuda")
        layer = model.model.layers[1].self_attn
        seen = []
        original = type(layer).forward

        def checked(self, *args, **kwargs):
            torch.cuda.set_sync_debug_mode("error")
            try:
                seen.append(self)
                return original(self, *args, **kwargs)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        type(layer).forward = checked
        try:
            model(**step)
        finally:
            type(layer).forward = original
    assert len(seen) == len(model.model.layers)


def test_bf16_decode_steps_on_the_kernels(tmp_path):
    """The caches' overlapping views go to the ahead-of-time kernels. Few enough blocks that no near tie swaps one."""
    folder = tiny_models.save_text_model(tmp_path)
    model = tiny_models.load(folder, "m3_sparse").bfloat16().cuda()
    length = tiny_models.TOPK * tiny_models.BLOCK - 20
    ids = tiny_models.prompt(2, length + 4).cuda()
    results = []
    for backend in (None, "torch"):
        with m3_sparse.backend(backend), torch.no_grad():
            cache = model(input_ids=ids[:, :length], use_cache=True).past_key_values
            steps = []
            for i in range(4):
                step = {"input_ids": ids[:, length + i : length + i + 1], "past_key_values": cache, "use_cache": True}
                steps.append(model(**step).logits)
            results.append(torch.cat(steps, 1).float())
    error = (results[0] - results[1]).norm() / results[1].norm()
    assert error < 2e-2, error
