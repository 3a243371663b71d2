"""The whole way to the user, with the official clients against a Hub on the loopback interface: publish, get_kernel,
lock, offline cache, local override. Each client runs in a process of its own, since HF_ENDPOINT is read at import.
"""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import cuda_extension
import pytest
from hub_standin import HubStandin

ROOT = Path(__file__).resolve().parent.parent
REPO = "m3-sparse/m3-sparse"
PUBLISH = str(ROOT / "tools" / "publish.py")
# What each client does with the module it got: one call with a known answer, and where the code came from.
USE = """
import torch
out, lse = m3_sparse.merge_states(torch.ones(2, 1, 1, 128), torch.zeros(2, 1, 1))
answer(value=round(lse.item(), 4), out=float(out.sum()), file=m3_sparse.__file__, name=m3_sparse.__name__)
"""
USED = {"value": 0.6931, "out": 128.0}


class Client:
    """Runs Python code against a Hub, with a cache of its own."""

    def __init__(self, url, home):
        # The last two make kernels 0.17 send a header that huggingface_hub 2 refuses.
        hidden = ("HF_", "HUGGINGFACE", "KERNELS_", "LOCAL_KERNELS", "DISABLE_TELEMETRY", "DO_NOT_TRACK")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
        self.environment = {**inherited, "HF_ENDPOINT": url, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"}

    def process(self, *command, **environment):
        everything = {**self.environment, **environment}
        return subprocess.run([sys.executable, *command], capture_output=True, text=True, env=everything, timeout=300)

    def run(self, code, **environment):
        """The keyword arguments that the code passed to answer(), or the error's type and text."""
        prelude = """
            import json, sys
            def answer(**values):
                print("ANSWER " + json.dumps(values))
        """
        done = self.process("-c", textwrap.dedent(prelude) + textwrap.dedent(code), **environment)
        answers = [line[7:] for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
        if done.returncode == 0 and answers:
            return json.loads(answers[-1])
        raise ClientError(done.stderr.strip() or done.stdout)


class ClientError(Exception):
    """A client process failed; the text is its error output."""


@pytest.fixture(scope="module")
def hub(request, tmp_path_factory, cpu_variant):
    """A Hub that trusts the publisher and holds the variants that can be built here."""
    if cuda_extension.missing_tools() is None:
        request.getfixturevalue("cuda_variant")
    with HubStandin(tmp_path_factory.mktemp("hub"), trusted={"m3-sparse"}) as server:
        client = Client(server.url, tmp_path_factory.mktemp("publisher"))
        done = client.process(PUBLISH, "--build", str(cpu_variant.parent), HF_TOKEN="hf_test")
        assert done.returncode == 0, done.stderr
        yield server
    log = (server.server.store.root / "requests.log").read_text()
    assert "UNHANDLED" not in log, [line for line in log.splitlines() if "UNHANDLED" in line]


@pytest.fixture
def client(hub, tmp_path):
    return Client(hub.url, tmp_path / "home")


def test_publishing_makes_the_version_branch_and_the_card(hub, cpu_variant):
    store = hub.server.store
    assert set(store.refs(REPO)) == {"main", "v1"}
    files = store.tree(REPO, store.resolve(REPO, "v1"))
    for path in cpu_variant.glob("*.py"):
        assert store.blob(files[f"build/torch-cpu/{path.name}"]).read_bytes() == path.read_bytes()
    assert "build/torch-cpu/metadata.json" in files
    assert {f"benchmarks/{path.name}" for path in (ROOT / "benchmarks").glob("*.py")} <= set(files)
    assert not [name for name in files if "__pycache__" in name]
    card = store.blob(store.tree(REPO, store.resolve(REPO, "main"))["README.md"]).read_text()
    assert card.startswith("---\nlibrary_name: kernels\nlicense: apache-2.0\n---\n")
    assert f'get_kernel("{REPO}", version=1)' in card and "- `merge_states`" in card
    assert "{%" not in card and "{{" not in card


def test_get_kernel_by_version(client):
    found = client.run(
        f"""
        from kernels import get_kernel, has_kernel
        assert has_kernel("{REPO}", version=1, backend="cpu")
        m3_sparse = get_kernel("{REPO}", version=1, backend="cpu")
        """
        + textwrap.indent(USE, " " * 8)
    )
    assert USED.items() <= found.items()
    assert "/build/torch-cpu/" in found["file"] or found["file"].endswith("torch-cpu/__init__.py")
    assert str(ROOT) not in found["file"], "the code has to come from the cache, not from the checkout"


def test_version_that_does_not_exist(client):
    with pytest.raises(ClientError, match="[Vv]ersion"):
        client.run(f'from kernels import get_kernel\nget_kernel("{REPO}", version=7, backend="cpu")\nanswer()')


def test_versions_are_listed(client):
    done = client.process("-c", "from kernels.cli import main; main()", "versions", REPO)
    assert done.returncode == 0, done.stderr
    assert "torch-cpu" in done.stdout and "1" in done.stdout


def test_untrusted_publisher_has_to_be_allowed(tmp_path, cpu_variant):
    with HubStandin(tmp_path / "hub") as hub:
        client = Client(hub.url, tmp_path / "home")
        publish = (PUBLISH, "--build", str(cpu_variant.parent), "--repo", "someone/m3-sparse")
        assert client.process(*publish, HF_TOKEN="hf_test").returncode == 0
        code = """
from kernels import get_kernel
m3_sparse = get_kernel("someone/m3-sparse", version=1, backend="cpu"{})
"""
        with pytest.raises(ClientError, match="trust"):
            client.run(code.format("") + USE)
        assert USED.items() <= client.run(code.format(", trust_remote_code=True") + USE).items()


def test_publishing_again_replaces_a_variant_as_a_whole(tmp_path, cpu_variant):
    """A file that a new build no longer has must go: the digest check refuses extra files."""
    with HubStandin(tmp_path / "hub") as hub:
        client = Client(hub.url, tmp_path / "home")
        publish = (PUBLISH, "--build", str(tmp_path / "build"))
        shutil.copytree(cpu_variant, tmp_path / "build" / "torch-cpu", ignore=shutil.ignore_patterns("__pycache__"))
        assert client.process(*publish, HF_TOKEN="hf_test").returncode == 0
        store = hub.server.store
        with store.lock:
            refs = store.refs(REPO)
            files = store.tree(REPO, refs["v1"])
            extra = {"build/torch-cpu/old.py": store.put(b""), "build/torch-other/kept.py": store.put(b"")}
            store.save_refs(REPO, {**refs, "v1": store.commit(REPO, {**files, **extra})})
        assert client.process(*publish, HF_TOKEN="hf_test").returncode == 0
        assert set(store.tree(REPO, store.resolve(REPO, "v1"))) == set(files) | {"build/torch-other/kept.py"}

        (tmp_path / "build" / "torch-cpu" / "_ops.py").write_text("damaged")
        done = client.process(*publish, HF_TOKEN="hf_test")
        assert done.returncode != 0 and "don't match their digest" in done.stderr


# A port that nothing listens on: a request would fail, not go somewhere else.
CLOSED = "http://127.0.0.1:9"
# huggingface_hub 2 refuses a partial snapshot when offline, and kernels 0.17 asks for the whole one, so one variant in
# the cache isn't enough: the branch (or the locked commit) is fetched whole.
PREFETCH = """
from huggingface_hub import snapshot_download
snapshot_download("{repo}", repo_type="kernel", revision="{revision}")
answer()
"""


def test_lock_and_load_without_network(client, hub, tmp_path):
    """The kernel is locked to a commit; once that is in the cache, loading it needs no Hub."""
    project = tmp_path / "user"
    project.mkdir()
    (project / "pyproject.toml").write_text(f'[tool.kernels.dependencies]\n"{REPO}" = 1\n')
    done = client.process("-c", "from kernels.cli import main; main()", "lock", str(project))
    assert done.returncode == 0, done.stderr
    commit = hub.server.store.resolve(REPO, "v1")
    assert commit in (project / "kernels.lock").read_text()
    client.run(PREFETCH.format(repo=REPO, revision=commit))
    code = f"""
    from pathlib import Path
    from kernels import load_kernel
    m3_sparse = load_kernel("{REPO}", lockfile=Path({str(project / "kernels.lock")!r}), backend="cpu")
    """
    assert USED.items() <= client.run(textwrap.dedent(code) + USE, HF_HUB_OFFLINE="1", HF_ENDPOINT=CLOSED).items()


def test_offline_from_the_cache(client):
    """Fetching by the branch's name also leaves the reference in the cache that version=1 is looked up by."""
    client.run(PREFETCH.format(repo=REPO, revision="v1"))
    code = f'from kernels import get_kernel\nm3_sparse = get_kernel("{REPO}", version=1, backend="cpu")\n'
    assert USED.items() <= client.run(code + USE, HF_HUB_OFFLINE="1", HF_ENDPOINT=CLOSED).items()


def test_local_override(client, cpu_variant):
    code = f'from kernels import get_kernel\nm3_sparse = get_kernel("{REPO}", version=1, backend="cpu")\n'
    found = client.run(code + USE, LOCAL_KERNELS=f"{REPO}={cpu_variant.parent}", HF_ENDPOINT=CLOSED)
    assert USED.items() <= found.items()
    assert Path(found["file"]) == cpu_variant / "__init__.py"


def test_cuda_build_of_torch_gets_the_cuda_variant_without_a_gpu(client, cuda_variant, hub):
    """What decides is what torch was built for. The extension has to load where there is no device and no driver."""
    store = hub.server.store
    assert f"build/{cuda_variant.name}/metadata.json" in store.tree(REPO, store.resolve(REPO, "v1"))
    found = client.run(
        f"""
        import torch
        torch.version.cuda = "13.0"
        from kernels import get_kernel
        m3_sparse = get_kernel("{REPO}", version=1)
        from importlib import import_module
        ops = import_module(m3_sparse.__name__ + "._ops").ops
        assert hasattr(ops, "aot_merge_states")
        """
        + textwrap.indent(USE, " " * 8)
    )
    assert USED.items() <= found.items()
    assert cuda_variant.name in found["file"]


def test_both_variants_in_one_process(client, cpu_variant, cuda_variant):
    """Namespaces and symbols of two builds don't meet."""
    code = f"""
    from pathlib import Path
    from kernels import get_local_kernel
    first = get_local_kernel(Path({str(cpu_variant)!r}), backend="cpu")
    m3_sparse = get_local_kernel(Path({str(cuda_variant)!r}))
    assert first is not m3_sparse
    """
    assert USED.items() <= client.run(textwrap.dedent(code) + USE).items()
