"""Installations that are broken or don't fit: each works, or ends in an error that names the remedy. What a user sees and
what to do about it is the table under "When something goes wrong" in docs/packaging.md; its rows are these tests.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap

import pytest
from launch_checks import LaunchChecks, error_of, needs_variant, operators

if __name__ != "__main__":  # the checks' own processes have no use for these, nor the way to them
    import build
    from hub_standin import HubStandin
    from package_copy import copy_variant
    from test_hub import CLOSED, PUBLISH, REPO, ROOT, USE, USED, Client, ClientError

    GET = f'from kernels import get_kernel\nm3_sparse = get_kernel("{REPO}", version=1, backend="cpu")\n'

check = LaunchChecks(__file__)


def load(*folders):
    """Code that imports each folder as a module of its own name."""
    lines = ["import importlib.util, sys"]
    for i, folder in enumerate(folders):
        lines += [
            f"at = {{'submodule_search_locations': [{str(folder)!r}]}}",
            f"spec = importlib.util.spec_from_file_location('m{i}', {str(folder / '__init__.py')!r}, **at)",
            f"m{i} = sys.modules['m{i}'] = importlib.util.module_from_spec(spec)",
            f"spec.loader.exec_module(m{i})",
        ]
    return "\n".join(lines) + "\n"


def python(code, cwd=None, **environment):
    everything = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, env=everything, timeout=120, cwd=cwd)


def refused(code):
    """The last line of the error; anything but an exception, a crash above all, fails."""
    done = python(code)
    assert done.returncode == 1, (done.returncode, done.stderr)
    return done.stderr.strip().splitlines()[-1]


# ---- the extension's file ----


@pytest.fixture
def cuda_copy(cuda_variant, tmp_path):
    return shutil.copytree(cuda_variant, tmp_path / cuda_variant.name, ignore=shutil.ignore_patterns("__pycache__"))


def library_of(folder):
    [path] = folder.glob("*.so")
    return path


@pytest.mark.parametrize("size", [0, 100, 5000, 0.5, 0.999])
def test_a_library_that_is_cut_short(cuda_copy, size):
    """The system's loader would end the process by a signal."""
    library = library_of(cuda_copy)
    os.truncate(library, int(library.stat().st_size * size) if size < 1 else size)
    line = refused(load(cuda_copy))
    assert line.startswith(f"ImportError: m3_sparse: {library.name} doesn't match its digest.")
    assert "delete that folder" in line and "fetch the kernel again" in line and str(cuda_copy) in line


def test_a_library_with_one_wrong_bit(cuda_copy):
    library = library_of(cuda_copy)
    data = bytearray(library.read_bytes())
    data[len(data) // 2] ^= 1
    library.write_bytes(data)
    assert "doesn't match its digest" in refused(load(cuda_copy))


def test_a_library_that_is_missing(cuda_copy):
    name = library_of(cuda_copy).name
    library_of(cuda_copy).unlink()
    assert f"m3_sparse: {name} is missing" in refused(load(cuda_copy))


def test_metadata_that_is_cut_short(cuda_copy):
    file = cuda_copy / "metadata.json"
    file.write_text(file.read_text()[:200])
    line = refused(load(cuda_copy))
    assert "metadata.json can't be read" in line and "fetch the kernel again" in line


def test_a_library_that_the_system_refuses(cuda_copy):
    """As with an older torch or another processor: the digest is right, the loader isn't content."""
    library_of(cuda_copy).write_bytes(b"\x7fELF of another machine" * 1000)
    metadata = json.loads((cuda_copy / "metadata.json").read_text())
    metadata["digest"]["files"] = build.digest_of(cuda_copy).files
    (cuda_copy / "metadata.json").write_text(json.dumps(metadata))
    line = refused(load(cuda_copy))
    assert line.startswith("ImportError: m3_sparse: the compiled extension can't be loaded here:")
    assert "torch 2.11 or newer" in line and "kernels.get_kernel" in line and "backend='cpu'" in line


def test_python_files_with_a_wrong_digest_are_found_by_the_documented_command(cpu_variant, tmp_path):
    """The clients don't look at digests, and the package checks its library only; the command does."""
    copy = shutil.copytree(cpu_variant, tmp_path / "torch-cpu", ignore=shutil.ignore_patterns("__pycache__"))
    text = (ROOT / "docs" / "packaging.md").read_text()
    command = re.search(r"```\npython -c \"(.*?)\" FOLDER\n```", text, re.DOTALL)[1]
    done = subprocess.run([sys.executable, "-c", command, str(copy)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with open(copy / "layers.py", "a") as file:
        file.write("\n")
    done = subprocess.run([sys.executable, "-c", command, str(copy)], capture_output=True, text=True)
    assert done.returncode == 1 and "DigestValidationError" in done.stderr and "layers.py" in done.stderr


# ---- the Hub and its cache ----


@pytest.fixture(scope="module")
def hub(tmp_path_factory, cpu_variant):
    """A Hub with the CPU variant only."""
    folder = tmp_path_factory.mktemp("published")
    shutil.copytree(cpu_variant, folder / "torch-cpu", ignore=shutil.ignore_patterns("__pycache__"))
    with HubStandin(tmp_path_factory.mktemp("hub"), trusted={"m3-sparse"}) as server:
        done = Client(server.url, tmp_path_factory.mktemp("publisher")).process(
            PUBLISH, "--build", str(folder), HF_TOKEN="hf_test"
        )
        assert done.returncode == 0, done.stderr
        yield server


@pytest.fixture
def client(hub, tmp_path):
    return Client(hub.url, tmp_path / "home")


def test_a_variant_that_is_missing(client):
    """A CUDA build of torch finds none here: the clients list what there is, and backend="cpu" takes the one that there is."""
    code = 'import torch\ntorch.version.cuda = "13.0"\n' + GET
    with pytest.raises(
        ClientError, match=r"FileNotFoundError: Cannot find a build variant for this system(.|\n)*torch-cpu"
    ):
        client.run(code.replace(', backend="cpu"', "") + "answer()")
    assert USED.items() <= client.run(code + USE).items()


def test_an_older_cuda_gets_no_variant_and_is_told_so(cuda_variant, tmp_path):
    code = f"""
    import torch
    torch.version.cuda = "12.6"
    from pathlib import Path
    from kernels import get_local_kernel
    get_local_kernel(Path({str(tmp_path)!r}))
    """
    shutil.copytree(cuda_variant, tmp_path / "build" / cuda_variant.name, ignore=shutil.ignore_patterns("__pycache__"))
    done = python(textwrap.dedent(code))
    assert "CUDA version (13.0) is not compatible with system CUDA version (12.6)" in done.stderr


def test_no_network(client):
    with pytest.raises(ClientError, match="could not verify publisher trust status|Connection refused|ConnectError"):
        client.run(GET + "answer()", HF_ENDPOINT=CLOSED)
    with pytest.raises(
        ClientError, match="not available in the local cache(.|\n)*Download the kernel while online first"
    ):
        client.run(GET + "answer()", HF_ENDPOINT=CLOSED, HF_HUB_OFFLINE="1")
    client.run(f"""
        from huggingface_hub import snapshot_download
        snapshot_download("{REPO}", repo_type="kernel", revision="v1")
        answer()
    """)
    assert USED.items() <= client.run(GET + USE, HF_ENDPOINT=CLOSED, HF_HUB_OFFLINE="1").items()


# ---- folders that can only be read ----

# Root may write anywhere, whatever the modes say: what a process gives up here, neither it nor its children get back.
BOUND_BY_MODES = """
import ctypes, os
class Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0, "PR_SET_NO_NEW_PRIVS"
assert libc.capset(ctypes.byref(Header(0x20080522, 0)), (ctypes.c_uint32 * 6)()) == 0, os.strerror(ctypes.get_errno())
def must_be_read_only(folder):
    try:
        os.mkdir(os.path.join(folder, "written"))
    except PermissionError:
        return
    raise AssertionError(folder + " can be written")
"""
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="capabilities are Linux's")


@pytest.fixture
def read_only():
    """`read_only(folder)` takes the right to write from everything below; the folders get it back, to be removed."""
    folders = []

    def close(folder):
        for path in (folder, *folder.rglob("*")):
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o555)
                folders.append(path)
            elif not path.is_symlink():
                path.chmod(0o444)
        return folder

    yield close
    for path in folders:
        path.chmod(0o755)


@pytest.fixture
def full_cache(client, tmp_path, read_only):
    client.run(f"""
        from huggingface_hub import snapshot_download
        snapshot_download("{REPO}", repo_type="kernel", revision="v1")
        answer()
    """)
    return read_only(tmp_path / "home")


@on_linux
@pytest.mark.parametrize("network", [True, False])
def test_a_cache_that_can_only_be_read(client, full_cache, network):
    """A full one works, online and offline."""
    options = {} if network else {"HF_ENDPOINT": CLOSED, "HF_HUB_OFFLINE": "1"}
    before = sorted(full_cache.rglob("*"))
    prove = f"must_be_read_only({str(full_cache)!r})\n"
    found = client.run(BOUND_BY_MODES + prove + GET + USE, PYTHONDONTWRITEBYTECODE="", **options)
    assert USED.items() <= found.items() and found["file"].startswith(str(full_cache))
    assert sorted(full_cache.rglob("*")) == before


@on_linux
def test_a_new_release_and_a_cache_that_can_only_be_read(client, hub, full_cache):
    """It can't be fetched, which is an error that names the folder; offline, what is there works on."""
    store = hub.server.store
    with store.lock:
        refs = store.refs(REPO)
        files = store.tree(REPO, refs["v1"])
        newer = store.commit(REPO, {**files, "build/torch-cpu/new.py": store.put(b"")})
        store.save_refs(REPO, {**refs, "v1": newer})
    try:
        with pytest.raises(ClientError, match=f"PermissionError.*Permission denied.*{full_cache}"):
            client.run(BOUND_BY_MODES + GET + "answer()")
    finally:
        with store.lock:
            store.save_refs(REPO, refs)
    assert USED.items() <= client.run(BOUND_BY_MODES + GET + USE, HF_HUB_OFFLINE="1").items()


@on_linux
def test_an_empty_cache_that_can_only_be_read(client, tmp_path, read_only):
    (tmp_path / "empty").mkdir()
    empty = read_only(tmp_path / "empty")
    with pytest.raises(ClientError, match=f"PermissionError.*Permission denied.*{empty}"):
        client.run(BOUND_BY_MODES + GET + "answer()", HF_HOME=str(empty))


@on_linux
@needs_variant
def test_a_package_that_can_only_be_read(cuda_copy, tmp_path, read_only):
    """The extension, its cubins and the compiler of jit's programs need no folder beside them, and no __pycache__."""
    read_only(cuda_copy)
    (tmp_path / "work").mkdir()
    code = f"""
    import json
    from pathlib import Path
    import sys
    must_be_read_only({str(cuda_copy)!r})
    sys.path[:0] = {[str(ROOT / "tests"), str(ROOT / "tools")]!r}
    from recording_driver import RecordingDriver
    index = json.loads(Path({str(ROOT / "build" / "kernels" / "index.json")!r}).read_text())
    driver = RecordingDriver(Path("work"), {{facts["entry"]: facts for facts in index}})
    """
    launch = """
    from m0 import _jit, _ops
    from test_install_faults import merge
    _ops.ops.aot_merge_states(*merge())
    assert len(driver.launches) == 1
    if _jit.missing("merge_states") is None:
        print(_jit._compile("combine", "combine_f32_f32_sm90a", Path("work"))["entry"])
    """
    code = BOUND_BY_MODES + textwrap.dedent(code) + load(cuda_copy) + textwrap.dedent(launch)
    done = python(code, cwd=tmp_path, PYTHONDONTWRITEBYTECODE="")
    assert done.returncode == 0, done.stderr
    assert not list(cuda_copy.rglob("__pycache__"))
    if importlib.util.find_spec("cutlass"):
        assert done.stdout.strip() == "m3s_combine_f32_f32_sm90a_0"


@on_linux
def test_no_folder_for_what_jit_compiles(cuda_copy, tmp_path, read_only):
    (tmp_path / "full").mkdir()
    folder = read_only(tmp_path / "full")
    code = f"import tempfile\ntempfile.tempdir = {str(folder)!r}\nfrom m0 import _jit\n"
    line = refused(BOUND_BY_MODES + load(cuda_copy) + code + '_jit._supply(0, "combine", "combine_f32_f32_sm90a")')
    assert line.startswith("RuntimeError: m3_sparse: jit: there is no folder to compile combine_f32_f32_sm90a in:")
    assert str(folder) in line and "set TMPDIR to one" in line and 'm3_sparse.backend("aot")' in line


# ---- two versions in one process ----


def test_two_versions_in_one_process(cpu_variant, tmp_path):
    """test_hub.py does the same with the CPU and the CUDA variant, whose extension's namespace is compiled in."""
    variant, folder = cpu_variant, copy_variant(cpu_variant, tmp_path / cpu_variant.name, "b")
    code = load(variant, folder) + textwrap.dedent("""
        import torch
        assert m0.capability.BUILT.keys() == m1.capability.BUILT.keys()
        assert m0.capability.BUILT["merge_states", "torch"] is not m1.capability.BUILT["merge_states", "torch"]
        for m in (m0, m1):
            out, lse = m.merge_states(torch.ones(2, 1, 1, 128), torch.zeros(2, 1, 1))
            assert abs(lse.item() - 0.6931) < 1e-3
        with m0.backend("aot"):
            m1.merge_states(torch.ones(2, 1, 1, 128), torch.zeros(2, 1, 1))
        print("both")
    """)
    done = python(code)
    assert done.stdout.strip() == "both", done.stderr


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_same_build_twice_in_one_process(request, tmp_path, kind):
    """From the Hub's cache and beside it, say: the second copy registers the operators again, and both work; where it
    can't, the error says what is loaded already."""
    variant = request.getfixturevalue(f"{kind}_variant")
    twin = shutil.copytree(variant, tmp_path / variant.name, ignore=shutil.ignore_patterns("__pycache__"))
    code = load(variant, twin) + textwrap.dedent("""
        import torch
        for m in (m0, m1):
            out, lse = m.merge_states(torch.ones(2, 1, 1, 128), torch.zeros(2, 1, 1))
            assert abs(lse.item() - 0.6931) < 1e-3
        print("both")
    """)
    done = python(code)
    assert done.stdout.strip() == "both", done.stderr


# ---- driver and device ----


def test_no_gpu(cuda_variant):
    """The CUDA variant loads without a driver; CPU tensors are the torch backend's, and aot by name says why it can't."""
    code = load(cuda_variant) + textwrap.dedent("""
        import torch
        x, y = torch.ones(2, 1, 1, 128), torch.zeros(2, 1, 1)
        assert abs(m0.merge_states(x, y)[1].item() - 0.6931) < 1e-3
        with m0.backend("aot"):
            m0.merge_states(x, y)
    """)
    line = refused(code)
    assert "backend 'aot' was asked for by name" in line and "the tensors are on cpu" in line
    assert "torch can run it: name no backend" in line


def merge(**changes):
    import torch

    return torch.empty(2, 4, 128), torch.empty(2, 4), torch.randn(3, 2, 4, 128), torch.randn(3, 2, 4)


UPDATE = "update it to release 580 (CUDA 13.0) or newer"
TORCH = 'm3_sparse.backend("torch")'


@check.without_driver
def no_driver(driver):
    text = error_of(operators().aot_merge_states, *merge())
    assert "no NVIDIA driver" in text and "Install one" in text and TORCH in text


@check.without_driver
def driver_of_cuda_11(driver):
    import tempfile
    from pathlib import Path

    from recording_driver import RecordingDriver

    with tempfile.TemporaryDirectory() as folder:
        RecordingDriver(Path(folder), {}, old=True)
        text = error_of(operators().aot_merge_states, *merge())
    assert "older than CUDA 12.0" in text and UPDATE in text and TORCH in text


@check
def driver_that_lacks_a_call(driver):
    driver.fail("cuLibraryLoadData")
    text = error_of(operators().aot_merge_states, *merge())
    assert "the NVIDIA driver lacks cuLibraryLoadData" in text and UPDATE in text


@check
def driver_too_old_for_the_cubins(driver):
    driver.fail("cuLibraryLoadData", 200)  # CUDA_ERROR_INVALID_IMAGE
    text = error_of(operators().aot_merge_states, *merge())
    assert "cuLibraryLoadData failed with error 200" in text and UPDATE in text and TORCH in text


@check
def no_device(driver):
    driver.fail("cuInit", 100)  # CUDA_ERROR_NO_DEVICE
    text = error_of(operators().aot_merge_states, *merge())
    assert "cuInit failed with error 100" in text and "CUDA_VISIBLE_DEVICES" in text


@check
def library_and_kernel_module_of_two_drivers(driver):
    driver.fail("cuInit", 803)  # CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
    assert UPDATE in error_of(operators().aot_merge_states, *merge())


@check
def forked_after_use(driver):
    driver.fail("cuInit", 3)  # CUDA_ERROR_NOT_INITIALIZED
    text = error_of(operators().aot_merge_states, *merge())
    assert "forked" in text and "spawn" in text


@check
def unsupported_gpu(driver):
    driver.set_capability(89)
    text = error_of(operators().aot_merge_states, *merge())
    assert "9.0, 10.0, 10.3; the device has 8.9" in text and TORCH in text


@needs_variant
@pytest.mark.parametrize("name", list(check.functions))
def test_the_driver_and_the_device(name):
    check.run(name)


def test_the_clients_refuse_an_unsupported_gpu_and_can_be_told_not_to(client, cuda_variant, monkeypatch):
    """The variant says what its cubins are for. With check_arch=False the torch backend serves other devices."""
    code = f"""
    import os
    import torch
    torch.version.cuda = "13.0"
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_capability = lambda device=None: (8, 9)
    from kernels import get_kernel
    m3_sparse = get_kernel("{REPO}", version=1, check_arch=CHECK)
    """
    options = {"LOCAL_KERNELS": f"{REPO}={cuda_variant.parent}"}
    with pytest.raises(ClientError, match="(?s)RuntimeError: .*8.9"):
        client.run(textwrap.dedent(code).replace("CHECK", "True") + "answer()", **options)
    tell = 'q = torch.empty(2, 2, 2, 128)\nanswer(text=m3_sparse.explain("merge_states", outs=q))'
    found = client.run(textwrap.dedent(code).replace("CHECK", "False") + tell, **options)
    assert "-> torch, by default" in found["text"]


# ---- the table ----


def test_every_row_of_the_table_is_tested():
    """Each row names its test."""
    text = (ROOT / "docs" / "packaging.md").read_text()
    section = text.partition("## When something goes wrong")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(test_\w+|\w+)` *\|$", section, re.MULTILINE))
    here = {name for name in globals() if name.startswith("test_")} | set(check.functions)
    assert len(named) >= 12 and named <= here, named - here


if __name__ == "__main__":
    check.main()
