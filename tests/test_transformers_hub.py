"""The Hub path: `attn_implementation="org/name"`, where transformers loads the package and binds its own sdpa mask."""

import pytest
import torch
from package_copy import copy_variant, forget
from tiny_models import (
    BLOCK,
    LONG,
    TOLERANCE,
    LargestTensor,
    greedy,
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
pytest.importorskip("transformers", minversion="5.17", reason="the Hub-kernel branch appeared in 5.17")
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLIndexer  # noqa: E402
from transformers.utils.import_utils import is_kernels_available  # noqa: E402

if not is_kernels_available():
    pytest.skip("transformers refuses the installed release of kernels", allow_module_level=True)

NAME = "someone/m3-sparse"
LENGTHS = (LONG, 2 * BLOCK + 7, 20)


@pytest.fixture(scope="module", autouse=True)
def repository(tmp_path_factory, variant_folder):
    """A repository that LOCAL_KERNELS puts in the Hub's place; its package is not the `m3_sparse` of this process."""
    root = tmp_path_factory.mktemp("repository")
    copy_variant(variant_folder, root / "build" / "torch-cpu", "_hub")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_KERNELS", f"{NAME}={root}")
        # Put back afterwards, without the copy's part.
        patch.setattr(MiniMaxM3VLIndexer, "forward", MiniMaxM3VLIndexer.forward)
        yield root
    from transformers import AttentionInterface

    forget(AttentionInterface()[NAME].__module__.partition(".")[0])
    # The copy's import took the plain name, too.
    m3_sparse.register_transformers()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_text_model(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def model(folder):
    return load(folder, NAME)


@pytest.fixture(scope="module")
def eager(folder):
    return load(folder, "eager")


@pytest.fixture(scope="module")
def ragged(eager):
    rows = [prompt(n, seed=n) for n in LENGTHS]
    with torch.no_grad():
        return rows, [eager(row[None]).logits[0] for row in rows]


def test_the_name_is_bound_to_the_loaded_package(model):
    from transformers import AttentionInterface

    attention = AttentionInterface()[NAME]
    assert model.config._attn_implementation == NAME
    assert attention.__name__ == "flash_attn_forward" and attention is not m3_sparse.flash_attn_forward


@torch.no_grad()
@pytest.mark.parametrize("length", [1, BLOCK, LONG])
def test_prefill(model, eager, length):
    ids = prompt(2, length)
    assert largest_difference(model(ids).logits, eager(ids).logits) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("with_positions", [True, False])
def test_left_padding(model, ragged, with_positions):
    rows, expected = ragged
    inputs = left_padded(rows)
    if not with_positions:
        del inputs["position_ids"]
    for found, reference in zip(model(**inputs).logits, expected):
        assert largest_difference(found[-len(reference) :], reference) < TOLERANCE


@torch.no_grad()
def test_right_padding_in_chunks(model, ragged):
    """Every row ends in padding, so only the first query of the second chunk tells where the chunk stands."""
    rows, expected = ragged
    ids, mask = (torch.nn.functional.pad(x, (0, 9)) for x in right_padded(rows).values())
    first = model(ids[:, :400], attention_mask=mask[:, :400], use_cache=True)
    second = model(ids[:, 400:], attention_mask=mask, past_key_values=first.past_key_values)
    for found, reference in zip(torch.cat([first.logits, second.logits], 1), expected):
        assert largest_difference(found[: len(reference)], reference) < TOLERANCE


@torch.no_grad()
def test_chunks_and_decoding_on_a_cache(model, eager):
    ids = prompt(2, LONG)
    expected = eager(ids).logits
    cache = model(ids[:, :400], use_cache=True).past_key_values
    found = [model(part, past_key_values=cache).logits for part in (ids[:, 400:-1], ids[:, -1:])]
    assert largest_difference(torch.cat(found, 1), expected[:, 400:]) < TOLERANCE


@pytest.mark.parametrize(
    "mode",
    [{}, {"cache_implementation": "static", "disable_compile": True}, {"prefill_chunk_size": 250}],
    ids=["dynamic", "static", "chunked"],
)
def test_generate(model, eager, ragged, mode):
    rows = ragged[0]
    inputs = left_padded(rows)
    del inputs["position_ids"]
    found = greedy(model, 5, **inputs, **mode)
    for tokens, row in zip(found, rows):
        assert torch.equal(tokens, greedy(eager, 5, input_ids=row[None])[0])
    alone = greedy(model, 5, input_ids=rows[0][None], **mode)
    assert torch.equal(alone[0], found[0])


@torch.no_grad()
def test_vision_language_model(tmp_path):
    from transformers import AutoModelForImageTextToText

    folder = save_vision_language_model(tmp_path)
    ids, pixels = prompt(1, 300), torch.randn(16, 96, generator=torch.Generator().manual_seed(1))
    ids[0, 10:14] = 500
    inputs = {"input_ids": ids, "pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 4]])}
    found, expected = (load(folder, n, AutoModelForImageTextToText)(**inputs).logits for n in (NAME, "eager"))
    assert largest_difference(found, expected) < TOLERANCE


@torch.no_grad()
def test_the_stock_indexer_is_replaced(model):
    """It scores every key for every query; without padding nothing else here is quadratic, the mask being None."""
    with LargestTensor() as largest:
        model(prompt(1, 2000), logits_to_keep=1)
    assert largest.elements < 2000**2


@torch.no_grad()
def test_refusals(model):
    ids = prompt(2, 200)
    holes = torch.ones_like(ids)
    holes[1, 50:60] = 0
    with pytest.raises(NotImplementedError, match="in row 1"):
        model(ids, attention_mask=holes)
    packed = torch.cat([torch.arange(90), torch.arange(110)])[None]
    for options in ({"use_cache": True}, {"use_cache": False}):
        with pytest.raises(NotImplementedError, match="row 0 restart|restarting position_ids, in row 0"):
            model(ids, position_ids=packed, **options)
    sliding = torch.ones(200, 200, dtype=torch.bool).tril().triu(-50)[None, None].expand(2, -1, -1, -1)
    with pytest.raises(NotImplementedError, match="expected the causal mask"):
        model(ids, attention_mask=sliding)


@torch.no_grad()
def test_the_plain_name_after_loading(model, folder, eager):
    """What the documentation recommends: load the kernel, then use "m3_sparse" with its compact mask."""
    from kernels import get_kernel

    kernel = get_kernel(NAME, version=1)
    kernel.register_transformers()
    inputs = left_padded([prompt(LONG), prompt(200)])
    found = load(folder, "m3_sparse")(**inputs).logits
    assert largest_difference(found[1, -200:], eager(prompt(200)[None]).logits[0]) < TOLERANCE
