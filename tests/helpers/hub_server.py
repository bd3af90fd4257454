"""A local stub of the Hugging Face hub: the part of its HTTP API that `huggingface_hub` uses.

It keeps model repositories in memory. It supports creating repositories and branches, preupload, LFS upload, commits
and downloads.
"""

from __future__ import annotations

import base64
import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha1, sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

TOKEN = "hf_write"  # may write everywhere
READ_TOKEN = "hf_read"  # may not write


@dataclass
class Repository:
    private: bool = False
    gated: bool = False
    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {}})
    messages: list[str] = field(default_factory=list)

    @property
    def files(self) -> dict[str, bytes]:
        return self.branches["main"]

    def commit(self, branch: str) -> str:
        """Return the hash of the current content of a branch."""
        return sha1(repr(sorted(self.branches[branch].items())).encode()).hexdigest()


@dataclass
class Hub:
    """The state of the stub.

    Attributes:
        repositories: Repositories by name.
        uploads: Content of LFS uploads by SHA-256.
        lfs: Whether safetensors files are uploaded with LFS, as on the real hub.
        down: Whether every request is answered with status 503.
        sizes: Sizes announced by HEAD instead of the real ones, by file name.
        requests: `METHOD path` of every request.
    """

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    uploads: dict[str, bytes] = field(default_factory=dict)
    lfs: bool = False
    down: bool = False
    sizes: dict[str, int] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)


class RefusedError(Exception):
    def __init__(self, status: int, code: str = "", message: str = "refused") -> None:
        self.status, self.code, self.message = status, code, message


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def handle_request(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        if self.headers.get("Transfer-Encoding") == "chunked":
            self.body = b""
            while size := int(self.rfile.readline(), 16):
                self.body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            if self.hub.down:
                raise RefusedError(503)
            self.check_token()
            self.answer(path)
        except RefusedError as refused:
            headers = {"X-Error-Message": refused.message}
            if refused.code:
                headers["X-Error-Code"] = refused.code
            self.send(refused.status, json.dumps({"error": refused.message}).encode(), headers)

    do_GET = do_HEAD = do_POST = do_PUT = handle_request  # noqa: N815

    def send(self, status: int, content: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def send_json(self, value: Any) -> None:
        self.send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    @property
    def token(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def check_token(self) -> None:
        if self.token not in ("", TOKEN, READ_TOKEN):
            raise RefusedError(401, message="Invalid credentials in Authorization header")

    def require_write(self) -> None:
        if self.token != TOKEN:
            raise RefusedError(403 if self.token else 401, message="no write permission")

    def find(self, name: str) -> Repository:
        """Return a repository that the token may read. As on the real hub, a private one is reported as not found."""
        repository = self.hub.repositories.get(name)
        if repository is None or (repository.private and not self.token):
            raise RefusedError(404 if self.token else 401, "RepoNotFound", "Repository not found")
        if repository.gated:
            raise RefusedError(403, "GatedRepo", "Access is restricted")
        return repository

    def answer(self, path: str) -> None:
        match path.strip("/").split("/"):
            case ["api", "repos", "create"]:
                self.create(json.loads(self.body))
            case ["api", "validate-yaml"]:
                self.validate(json.loads(self.body)["content"])
            case ["api", "models", user, name]:
                repository = self.find(f"{user}/{name}")
                self.send_json(
                    {"id": f"{user}/{name}", "private": repository.private, "sha": repository.commit("main")}
                )
            case ["api", "models", user, name, "branch", branch]:
                self.require_write()
                branches = self.find(f"{user}/{name}").branches
                if branch in branches:
                    raise RefusedError(409)
                branches[branch] = dict(branches["main"])
                self.send(200)
            case ["api", "models", user, name, "preupload", branch]:
                self.require_write()
                self.files(f"{user}/{name}", branch)
                self.preupload(json.loads(self.body)["files"])
            case [_, _, "info", "lfs", "objects", "batch"]:
                self.require_write()
                objects = json.loads(self.body)["objects"]
                for one in objects:
                    one["actions"] = {"upload": {"href": f"{self.hub.url}/upload/{one['oid']}"}}
                self.send_json({"transfer": "basic", "objects": objects})
            case ["upload", oid]:
                assert self.command == "PUT"
                assert sha256(self.body).hexdigest() == oid
                self.hub.uploads[oid] = self.body
                self.send(200)
            case ["api", "models", user, name, "commit", branch]:
                self.require_write()
                self.commit(f"{user}/{name}", branch)
            case [user, name, "resolve", branch, file]:
                self.resolve(f"{user}/{name}", branch, file)
            case _:
                raise RefusedError(404)

    def files(self, name: str, branch: str) -> dict[str, bytes]:
        repository = self.find(name)
        if branch not in repository.branches:
            raise RefusedError(404, "RevisionNotFound", "Invalid revision")
        return repository.branches[branch]

    def create(self, request: dict[str, Any]) -> None:
        self.require_write()
        name = f"{request['organization']}/{request['name']}"
        private = request.get("visibility") == "private" or bool(request.get("private"))
        existed = name in self.hub.repositories
        self.hub.repositories.setdefault(name, Repository(private))
        content = json.dumps({"url": f"{self.hub.url}/{name}"}).encode()
        self.send(409 if existed else 200, content)

    def validate(self, content: str) -> None:
        """Reject an unknown license, as the real hub does."""
        if 'license: "unknown-license"' in content:
            self.send(400, json.dumps({"errors": [{"message": '"license" must be one of [mit]'}]}).encode())
        else:
            self.send_json({"errors": [], "warnings": []})

    def preupload(self, files: list[dict[str, Any]]) -> None:
        answers = []
        for file in files:
            lfs = self.hub.lfs and file["path"].endswith(".safetensors")
            mode = "lfs" if lfs else "regular"
            answers.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": None})
        self.send_json({"files": answers})

    def commit(self, name: str, branch: str) -> None:
        files, repository = self.files(name, branch), self.find(name)
        assert self.headers["Content-Type"] == "application/x-ndjson"
        for line in self.body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                repository.messages.append(value["summary"])
            elif entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            else:
                assert entry["key"] == "lfsFile"
                files[value["path"]] = self.hub.uploads[value["oid"]]
        oid = repository.commit(branch)
        self.send_json({"commitUrl": f"{self.hub.url}/{name}/commit/{oid}", "commitOid": oid})

    def resolve(self, name: str, branch: str, file: str) -> None:
        files = self.files(name, branch)
        commit = {"X-Repo-Commit": self.hub.repositories[name].commit(branch)}
        if file not in files:
            self.send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found", **commit})
            return
        headers = {"ETag": f'"{sha256(files[file]).hexdigest()}"', **commit}
        if file in self.hub.sizes:
            headers["X-Linked-Size"] = str(self.hub.sizes[file])
        self.send(200, files[file], headers)


@contextlib.contextmanager
def running_hub() -> Iterator[Hub]:
    """Run a stub on a free local port."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def use_hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Make `huggingface_hub` in this process use a stub, with an empty cache and a write token."""
    with running_hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield hub
