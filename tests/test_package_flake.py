"""flake.nix and flake.lock. Where Nix is installed it parses and evaluates the flake; elsewhere its form is checked."""

import base64
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLAKE = ROOT / "flake.nix"
NIX = shutil.which("nix-instantiate")


@pytest.mark.skipif(NIX is None, reason="nix-instantiate isn't installed, the flake's form alone is checked")
def test_flake_evaluates():
    """With a builder that returns its arguments, the outputs are the call that kernel-builder documents."""
    subprocess.run([NIX, "--parse", str(FLAKE)], check=True, capture_output=True)
    expression = f"""
      let
        flake = import {FLAKE};
        builder = {{ lib.genKernelFlakeOutputs = arguments: arguments; }};
        outputs = flake.outputs {{ self = "self"; kernel-builder = builder; }};
      in {{ url = flake.inputs.kernel-builder.url; arguments = builtins.attrNames outputs; self = outputs.self; }}
    """
    command = [NIX, "--eval", "--strict", "--json", "--expr", expression]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert json.loads(done.stdout) == {
        "url": "github:huggingface/kernels",
        "arguments": ["path", "self"],
        "self": "self",
    }


def test_flake_has_the_documented_form():
    text = FLAKE.read_text()
    plain = re.sub(r'"[^"]*"', '""', text)
    for left, right in ("{}", "()", "[]"):
        assert plain.count(left) == plain.count(right)
    words = re.sub(r"\s+", " ", text)
    assert 'inputs.kernel-builder.url = "github:huggingface/kernels";' in words
    assert "{ self, kernel-builder }: kernel-builder.lib.genKernelFlakeOutputs { inherit self; path = ./.; };" in words


def test_lock_is_complete():
    lock = json.loads((ROOT / "flake.lock").read_text())
    nodes = lock["nodes"]
    assert lock["version"] == 7
    assert nodes[lock["root"]]["inputs"] == {"kernel-builder": "kernel-builder"}
    assert nodes["kernel-builder"]["original"] == {"owner": "huggingface", "repo": "kernels", "type": "github"}
    for name, node in nodes.items():
        for target in node.get("inputs", {}).values():
            # A list is a path of inputs from the root ("follows"), a string names a node.
            assert follow(nodes, lock["root"], target) in nodes if isinstance(target, list) else target in nodes
        if name != lock["root"]:
            locked = node["locked"]
            assert re.fullmatch("[0-9a-f]{40}", locked["rev"])
            assert locked["narHash"].startswith("sha256-") and len(base64.b64decode(locked["narHash"][7:])) == 32
            assert {"owner", "repo", "type", "lastModified"} <= locked.keys()


def follow(nodes, root, path):
    current = root
    for step in path:
        current = nodes[current]["inputs"][step]
    return current
