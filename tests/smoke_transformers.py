"""The adapter's main cases as a plain script, for versions of transformers other than the one the suite runs on.

    PYTHONPATH=<folder with another transformers> python tests/smoke_transformers.py build/torch-cpu

prints the version and one line per case, and fails at the first wrong result.
"""

import importlib.util
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import transformers
from tiny_models import (
    BLOCK,
    LONG,
    TOLERANCE,
    greedy,
    largest_difference,
    left_padded,
    load,
    prompt,
    save_text_model,
)

TOKENS = 6


def import_package(folder):
    """The built variant as `m3_sparse`; with transformers loaded, the import itself registers the adapter."""
    spec = importlib.util.spec_from_file_location(
        "m3_sparse", Path(folder) / "__init__.py", submodule_search_locations=[str(folder)]
    )
    module = sys.modules["m3_sparse"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def check_prefill(eager, model):
    ids = prompt(2, LONG)
    assert largest_difference(model(ids).logits, eager(ids).logits) < TOLERANCE


def check_short_prompt(eager, model):
    ids = prompt(1, 7)
    assert largest_difference(model(ids).logits, eager(ids).logits) < TOLERANCE


def check_cached_decode(eager, model):
    ids = prompt(2, LONG)
    expected = eager(ids).logits
    cache = model(ids[:, :-3], use_cache=True).past_key_values
    for i in range(LONG - 3, LONG):
        found = model(ids[:, i : i + 1], past_key_values=cache).logits[:, 0]
        assert largest_difference(found, expected[:, i]) < TOLERANCE


def check_greedy(eager, model):
    ids = prompt(1, LONG)
    assert torch.equal(greedy(model, TOKENS, input_ids=ids), greedy(eager, TOKENS, input_ids=ids))


def check_left_padding(eager, model):
    rows = [prompt(LONG), prompt(2 * BLOCK - 3, seed=2)]
    inputs = left_padded(rows)
    logits = model(**inputs).logits
    del inputs["position_ids"]
    tokens = greedy(model, TOKENS, **inputs)
    for i, row in enumerate(rows):
        assert largest_difference(logits[i, -len(row) :], eager(row[None]).logits[0]) < TOLERANCE
        assert torch.equal(tokens[i], greedy(eager, TOKENS, input_ids=row[None])[0])


def check_static_cache(eager, model):
    ids = prompt(1, LONG)
    found = greedy(model, TOKENS, input_ids=ids, cache_implementation="static", disable_compile=True)
    assert torch.equal(found, greedy(eager, TOKENS, input_ids=ids))


def check_packed_sequences_are_refused(eager, model):
    positions = torch.cat([torch.arange(30), torch.arange(40)])[None]
    try:
        model(prompt(1, 70), position_ids=positions)
    except NotImplementedError as error:
        assert "packed" in str(error)
    else:
        raise AssertionError("packed sequences were accepted")


def check_compile(eager, model):
    ids = prompt(1, LONG)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert largest_difference(compiled(ids, use_cache=False).logits, eager(ids).logits) < TOLERANCE


@torch.no_grad()
def main():
    torch.set_num_threads(1)
    print("transformers", transformers.__version__, flush=True)
    import_package(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        save_text_model(folder)
        eager, model = load(folder, "eager"), load(folder, "m3_sparse")
        assert model.config._attn_implementation == "m3_sparse"
        for name, check in list(globals().items()):
            if name.startswith("check_"):
                check(eager, model)
                print(name[len("check_") :], "ok", flush=True)


if __name__ == "__main__":
    main()
