"""A small stand-in for the Hugging Face Hub's kernel repositories, for tests without network access.

It listens on the loopback interface only and keeps everything in one directory. Unmodified ``huggingface_hub`` and
``kernels`` clients work against it when ``HF_ENDPOINT`` points at it: creating a repository, a branch and a commit,
and ``get_kernel``, ``has_kernel``, version listing, locking and downloading. It checks no token and no signature.

From the command line (the trusted publishers are a comma-separated list and may be left out)::

    python tools/hub_standin.py --root hub-data --port 8765 --trusted m3-sparse
    HF_ENDPOINT=http://127.0.0.1:8765 HF_HOME=hub-cache python -m pytest tests

From a test::

    with HubStandin(tmp_path, trusted={"org"}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)

``HF_ENDPOINT`` is read when ``huggingface_hub`` is imported, so start the client in a new process. Each request is
written to ``requests.log`` below the root, and one that no route answers is marked UNHANDLED there.

Storage: ``blobs/<sha256>`` holds file contents, ``repos/<org>--<name>/commits/<sha>`` maps paths to blobs, and
``repos/<org>--<name>/refs.json`` maps branches to commits.
"""

import argparse
import base64
import hashlib
import json
import os
import re
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

REPO = r"([^/]+/[^/]+)"


class Store:
    """Repositories, commits and file contents on disk."""

    def __init__(self, root: Path):
        self.root = Path(root)
        (self.root / "blobs").mkdir(parents=True, exist_ok=True)
        self.lock = threading.Lock()

    def _repo(self, repo: str) -> Path:
        return self.root / "repos" / repo.replace("/", "--")

    def refs(self, repo: str) -> dict[str, str] | None:
        path = self._repo(repo) / "refs.json"
        return json.loads(path.read_text()) if path.exists() else None

    def save_refs(self, repo: str, refs: dict[str, str]) -> None:
        (self._repo(repo) / "refs.json").write_text(json.dumps(refs))

    def create(self, repo: str) -> None:
        self._repo(repo).mkdir(parents=True)
        self.save_refs(repo, {"main": self.commit(repo, {})})

    def resolve(self, repo: str, revision: str) -> str | None:
        refs = self.refs(repo)
        if refs is None:
            return None
        revision = revision.removeprefix("refs/heads/")
        if revision in refs:
            return refs[revision]
        return revision if (self._repo(repo) / "commits" / revision).exists() else None

    def tree(self, repo: str, commit: str) -> dict[str, str]:
        return json.loads((self._repo(repo) / "commits" / commit).read_text())

    def commit(self, repo: str, files: dict[str, str]) -> str:
        sha = hashlib.sha1(json.dumps(files, sort_keys=True).encode() + os.urandom(4)).hexdigest()
        folder = self._repo(repo) / "commits"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / sha).write_text(json.dumps(files))
        return sha

    def blob(self, digest: str) -> Path:
        return self.root / "blobs" / digest

    def put(self, data: bytes) -> str:
        digest = hashlib.sha256(data).hexdigest()
        self.blob(digest).write_bytes(data)
        return digest


class Handler(BaseHTTPRequestHandler):
    """The routes; `store`, `trusted`, `log` and `base` are set on the server object."""

    protocol_version = "HTTP/1.1"

    @property
    def store(self) -> Store:
        return self.server.store

    def log_message(self, format, *args):
        self.server.log.write(f"{self.command} {self.path} {args[1] if len(args) > 1 else ''}\n")

    def answer(self, value, status=200, **headers):
        data = json.dumps(value).encode()
        self.send_response(status)
        for name, text in headers.items():
            self.send_header(name.replace("_", "-"), text)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def missing(self, code="RepoNotFound", **headers):
        self.answer({"error": code}, 404, X_Error_Code=code, X_Error_Message=code, **headers)

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        url = urllib.parse.urlsplit(self.path)
        # A revision may arrive as refs%2Fheads%2Fv1; the slashes inside it must not split the path.
        path = urllib.parse.unquote(url.path.replace("refs%2Fheads%2F", ""))
        if found := re.fullmatch(r"/api/organizations/([^/]+)/overview", path):
            name = found[1]
            trusted = name in self.server.trusted
            return self.answer({"name": name, "fullname": name, "avatarUrl": "", "trustedKernelPublisher": trusted})
        if path == "/api/agent-harnesses":
            return self.answer({"standardEnvVars": [], "harnesses": {}})
        if path == "/api/whoami-v2":
            token = {"accessToken": {"role": "write"}}
            return self.answer({"type": "user", "name": "tester", "orgs": [], "auth": token})
        if found := re.fullmatch(rf"/api/kernels/{REPO}/refs", path):
            refs = self.store.refs(found[1])
            if refs is None:
                return self.missing()
            branches = [{"name": b, "ref": f"refs/heads/{b}", "targetCommit": c} for b, c in refs.items()]
            return self.answer({"branches": branches, "converts": [], "tags": []})
        if found := re.fullmatch(rf"/api/kernels/{REPO}/tree/([^/]+)(?:/(.*))?", path):
            return self.list_tree(found[1], found[2], found[3], "recursive=true" in url.query.lower())
        if found := re.fullmatch(rf"/api/kernels/{REPO}(?:/revision/([^/]+))?", path):
            return self.repo_info(found[1], found[2] or "main")
        if found := re.fullmatch(rf"/kernels/{REPO}/resolve/([^/]+)/(.*)", path):
            return self.send_file(found[1], found[2], found[3])
        self.unhandled(b"")

    def list_tree(self, repo, revision, folder, recursive):
        commit = self.store.resolve(repo, revision)
        if commit is None:
            return self.missing("RevisionNotFound")
        prefix = folder.strip("/") + "/" if folder else ""
        entries = {}
        for name, digest in self.store.tree(repo, commit).items():
            if not name.startswith(prefix):
                continue
            first, _, rest = name[len(prefix) :].partition("/")
            if rest and not recursive:
                entries[prefix + first] = {"type": "directory", "oid": "0" * 40, "size": 0, "path": prefix + first}
            else:
                size = self.store.blob(digest).stat().st_size
                entries[name] = {"type": "file", "oid": digest[:40], "size": size, "path": name}
        if prefix and not entries:
            return self.missing("EntryNotFound")
        self.answer(list(entries.values()))

    def repo_info(self, repo, revision):
        commit = self.store.resolve(repo, revision)
        if commit is None:
            return self.missing("RepoNotFound" if self.store.refs(repo) is None else "RevisionNotFound")
        files = [{"rfilename": name} for name in self.store.tree(repo, commit)]
        info = {"id": repo, "sha": commit, "private": False, "tags": [], "downloads": 0, "likes": 0}
        self.answer({**info, "author": repo.split("/")[0], "siblings": files})

    def send_file(self, repo, revision, name):
        commit = self.store.resolve(repo, revision)
        if commit is None:
            return self.missing("RevisionNotFound")
        digest = self.store.tree(repo, commit).get(name)
        if digest is None:
            return self.missing("EntryNotFound", X_Repo_Commit=commit)
        data = self.store.blob(digest).read_bytes()
        self.send_response(200)
        self.send_header("ETag", f'"{digest}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Type", "application/octet-stream")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def do_PUT(self):
        data = self.body()
        if found := re.fullmatch(r"/lfs/([0-9a-f]{64})", self.path):
            if self.store.put(data) != found[1]:
                return self.answer({"error": "checksum"}, 400)
            return self.answer({})
        self.unhandled(data)

    def do_POST(self):
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        raw = self.body()
        if path == "/api/repos/create":
            return self.create_repo(json.loads(raw))
        if path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if found := re.fullmatch(rf"/api/kernels/{REPO}/branch/([^/]+)", path):
            return self.create_branch(found[1], found[2])
        if found := re.fullmatch(rf"/api/kernels/{REPO}/preupload/([^/]+)", path):
            # "regular" puts contents into the commit body; "lfs" would send a current client to Xet storage.
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None}
                for file in json.loads(raw)["files"]
            ]
            return self.answer({"files": files})
        if re.fullmatch(rf"/kernels/{REPO}\.git/info/lfs/objects/batch", path):
            objects = [
                {**item, "actions": {"upload": {"href": f"{self.server.base}/lfs/{item['oid']}"}}}
                for item in json.loads(raw)["objects"]
            ]
            return self.answer({"transfer": "basic", "objects": objects})
        if found := re.fullmatch(rf"/api/kernels/{REPO}/commit/(.+)", path):
            return self.create_commit(found[1], found[2].removeprefix("refs/heads/"), raw)
        self.unhandled(raw)

    def create_repo(self, request):
        repo = f"{request.get('organization') or 'tester'}/{request['name']}"
        url = f"{self.server.base}/kernels/{repo}"
        with self.store.lock:
            if self.store.refs(repo) is not None:
                return self.answer({"error": "exists", "url": url}, 409)
            self.store.create(repo)
        self.answer({"url": url, "name": repo})

    def create_branch(self, repo, branch):
        with self.store.lock:
            refs = self.store.refs(repo)
            if refs is None:
                return self.missing()
            if branch in refs:
                return self.answer({"error": "exists"}, 409)
            self.store.save_refs(repo, {**refs, branch: refs["main"]})
        self.answer({})

    def create_commit(self, repo, branch, raw):
        with self.store.lock:
            refs = self.store.refs(repo)
            if refs is None or branch not in refs:
                return self.missing("RepoNotFound" if refs is None else "RevisionNotFound")
            files = self.store.tree(repo, refs[branch])
            for line in raw.splitlines():
                entry = json.loads(line)
                kind, value = entry["key"], entry["value"]
                if kind == "file":
                    files[value["path"]] = self.store.put(base64.b64decode(value["content"]))
                elif kind == "lfsFile":
                    files[value["path"]] = value["oid"]
                elif kind == "deletedFile":
                    files.pop(value["path"], None)
                elif kind == "deletedFolder":
                    folder = value["path"].rstrip("/") + "/"
                    files = {name: digest for name, digest in files.items() if not name.startswith(folder)}
            refs[branch] = self.store.commit(repo, files)
            self.store.save_refs(repo, refs)
        url = f"{self.server.base}/kernels/{repo}/commit/{refs[branch]}"
        self.answer({"success": True, "commitOid": refs[branch], "commitUrl": url, "hookOutput": ""})

    def unhandled(self, raw):
        self.server.log.write(f"UNHANDLED {self.command} {self.path} {raw[:300]!r}\n")
        self.missing("NotFound")


class HubStandin:
    """The server as a context manager; `url` is its endpoint. Port 0 takes a free port."""

    def __init__(self, root, port: int = 0, trusted=()):
        store = Store(Path(root))
        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.server.daemon_threads = True
        self.server.store = store
        self.server.trusted = set(trusted)
        self.server.log = open(store.root / "requests.log", "a", buffering=1)  # noqa: SIM115  until the server ends
        self.server.base = self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self):
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *error):
        self.server.shutdown()
        self.thread.join()
        self.close()

    def close(self):
        self.server.server_close()
        self.server.log.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Loopback stand-in for the Hub's kernel repositories (tests only).")
    parser.add_argument("--root", type=Path, required=True, help="directory for all data")
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--trusted", default="", help="publishers to report as trusted, separated by commas")
    options = parser.parse_args()
    hub = HubStandin(options.root, options.port, filter(None, options.trusted.split(",")))
    print(hub.url, flush=True)
    try:
        hub.server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        hub.close()


if __name__ == "__main__":
    main()
