"""Registration: names, repetition, several copies of the package, and who else keeps the stock indexer."""

import os
import subprocess
import sys

import pytest
import torch
from package_copy import copy_variant, forget, import_variant
from tiny_models import TOLERANCE, largest_difference, left_padded, load, prompt, save_text_model

import m3_sparse

m3_sparse.register_transformers()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_text_model(tmp_path_factory.mktemp("text"))


@pytest.fixture
def modeling(monkeypatch):
    """transformers' module, with the indexer's forward put back afterwards."""
    from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl

    monkeypatch.setattr(
        modeling_minimax_m3_vl.MiniMaxM3VLIndexer, "forward", modeling_minimax_m3_vl.MiniMaxM3VLIndexer.forward
    )
    return modeling_minimax_m3_vl


@pytest.fixture
def second_copy(tmp_path, variant_folder):
    yield import_variant(copy_variant(variant_folder, tmp_path / "copy", "_copy"), "m3_sparse_copy")
    forget("m3_sparse_copy")
    m3_sparse.register_transformers()


def forwards(indexer_class):
    chain, forward = [], indexer_class.forward
    while forward is not None:
        chain.append(forward)
        forward = getattr(forward, "_m3_sparse_previous", None)
    return chain


def test_registering_again_changes_nothing(modeling):
    before = forwards(modeling.MiniMaxM3VLIndexer)
    assert len(before) > 1 and before[-1].__qualname__ == "MiniMaxM3VLIndexer.forward"
    m3_sparse.register_transformers()
    m3_sparse.register_transformers("another_name")
    assert forwards(modeling.MiniMaxM3VLIndexer) == before


@torch.no_grad()
def test_another_name(folder):
    m3_sparse.register_transformers("another_name")
    inputs = left_padded([prompt(450), prompt(300)])
    found = load(folder, "another_name")(**inputs).logits
    assert largest_difference(found, load(folder, "m3_sparse")(**inputs).logits) == 0


@pytest.mark.parametrize(
    "name", ["flash_m3", "org/m3-sparse", "sdpa", "my_sdpa", "eager", "flex_attention", "paged|m3", "m3@1", "m3:f"]
)
def test_names_that_transformers_reads_otherwise(name):
    with pytest.raises(ValueError, match="expected a name without .* but got"):
        m3_sparse.register_transformers(name)


def test_names_that_are_none():
    with pytest.raises(TypeError, match="expected name to be a string, but got int"):
        m3_sparse.register_transformers(3)
    with pytest.raises(ValueError, match="expected a name, but got an empty string"):
        m3_sparse.register_transformers("")


@torch.no_grad()
def test_other_implementations_keep_the_stock_indexer(folder, monkeypatch):
    ids = prompt(1, 450)
    adapter = sys.modules["m3_sparse.transformers"]
    monkeypatch.setattr(adapter, "project_index", lambda *args: pytest.fail("the adapter's indexer ran"))
    eager, sdpa = load(folder, "eager")(ids).logits, load(folder, "sdpa")(ids).logits
    assert largest_difference(eager, sdpa) < TOLERANCE


@torch.no_grad()
def test_two_copies_side_by_side(folder, modeling, second_copy):
    """Each serves its own name, whichever was registered last."""
    inputs = left_padded([prompt(450), prompt(300)])
    # Importing the copy bound "m3_sparse" to it.
    second_copy.register_transformers("copy_of_m3")
    m3_sparse.register_transformers()
    logits, length = [], len(forwards(modeling.MiniMaxM3VLIndexer))
    for _ in range(2):
        assert len(forwards(modeling.MiniMaxM3VLIndexer)) == length
        for name, module in (("m3_sparse", "m3_sparse"), ("copy_of_m3", "m3_sparse_copy")):
            model = load(folder, name)
            logits.append(model(**inputs).logits)
            hidden, positions = torch.zeros(1, 4, 64), torch.arange(4)[None]
            embeddings = model.model.rotary_emb(hidden, positions)
            states = model.model.layers[1].self_attn.indexer(hidden, embeddings, None, positions)
            assert type(states).__module__ == f"{module}.transformers"
        second_copy.register_transformers("copy_of_m3")
    assert all(largest_difference(logits[0], x) == 0 for x in logits)


LOAD = """
import importlib.util, sys
def load():
    spec = importlib.util.spec_from_file_location("m3_sparse", sys.argv[1] + "/__init__.py",
                                                  submodule_search_locations=[sys.argv[1]])
    sys.modules["m3_sparse"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
"""


def run(script, *arguments):
    command = [sys.executable, "-c", LOAD + script, *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


def test_without_transformers(variant_folder):
    """An import of it inside the package would fail here."""
    script = """
sys.modules["transformers"] = None
package = load()
try:
    package.register_transformers()
except ModuleNotFoundError as error:
    print("ModuleNotFoundError")
"""
    assert run(script, variant_folder) == ["ModuleNotFoundError"]


def test_import_with_transformers_loaded(variant_folder):
    """The import registers; beside an unsupported version it does nothing, and the explicit call says what it needs."""
    script = """
import transformers
from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as modeling
# Loading a model puts another module object in its place.
transformers = sys.modules["transformers"]
def names():
    interfaces = transformers.AttentionInterface, transformers.AttentionMaskInterface
    return ["m3_sparse" in interface()._global_mapping for interface in interfaces]
def attempt():
    try:
        package.register_transformers()
    except NotImplementedError as error:
        print(error)
real, transformers.__version__ = transformers.__version__, "4.57.0"
package = load()
print(names())
attempt()
transformers.__version__, indexer = real, modeling.MiniMaxM3VLIndexer
del modeling.MiniMaxM3VLIndexer
sys.modules["m3_sparse.transformers"].register_if_loaded()
print(names())
attempt()
modeling.MiniMaxM3VLIndexer = indexer
sys.modules["m3_sparse.transformers"].register_if_loaded()
print(names())
"""
    before, old, without, incomplete, after = run(script, variant_folder)
    assert before == without == "[False, False]" and after == "[True, True]"
    assert "expected transformers 5.13.0 or newer" in old and old.endswith("found transformers 4.57.0")
    assert "expected transformers 5.13.0 or newer" in incomplete and "MiniMaxM3VLIndexer" in incomplete
