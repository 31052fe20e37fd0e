"""A Hub on loopback: as much of the Hub's HTTP interface as huggingface_hub's own client asks for here.

Repositories live in memory, those of data sets as ``datasets/owner/name``. Like the Hub, it commits small files inline
and takes ``*.safetensors`` through the LFS batch interface, keeps every commit under its hash, and answers requests for
files with the headers that fill the client's cache. An unknown request gets a 404, so a client that asks for
something new fails loudly.
"""

import base64
import hashlib
import json
import re
from http.server import BaseHTTPRequestHandler
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml
from loopback import LoopbackServer

TOKEN = "hf_loopback"  # what a client must present to write, or to read a private repository


class Repository:
    """Commits by hash, newest last; each is the whole tree, path -> content."""

    def __init__(self, private: bool) -> None:
        self.private = private
        self.commits: dict[str, dict[str, bytes]] = {}
        self.branches: dict[str, str] = {}
        self.commit({}, "initial commit")

    @property
    def head(self) -> str:
        return self.branches["main"]

    def commit(self, changes: dict[str, bytes], message: str, branch: str = "main") -> str:
        tree = {**(self.commits[self.branches[branch]] if self.commits else {}), **changes}
        text = repr((len(self.commits), message, sorted((path, sha256(data)) for path, data in tree.items())))
        oid = hashlib.sha1(text.encode()).hexdigest()
        self.commits[oid] = tree
        self.branches[branch] = oid
        return oid

    def resolve(self, revision: str) -> str | None:
        """The commit that ``revision`` names, or None."""
        if revision in self.branches:
            return self.branches[revision]
        return revision if revision in self.commits else None


class HubServer(LoopbackServer):
    """``with HubServer() as hub``: serves ``hub.repositories`` at ``hub.endpoint``; ``hub.requests`` is its log."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.blobs: dict[str, bytes] = {}  # LFS objects by sha256
        self.requests: list[str] = []
        self.faults: list[tuple[str, int]] = []  # a request that matches the first one gets its status, once
        super().__init__(_Handler, hub=self)
        self.endpoint = self.address


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Keep the test output clean; ``hub.requests`` has the log."""

    def do_HEAD(self) -> None:
        self._route("GET")

    def do_GET(self) -> None:
        self._route("GET")

    def do_POST(self) -> None:
        self._route("POST")

    def do_PUT(self) -> None:
        self._route("PUT")

    def _route(self, method: str) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            self.body = self._read_chunks()
        fault = next((each for each in self.hub.faults if re.search(each[0], f"{method} {path}")), None)
        if fault is not None:
            self.hub.faults.remove(fault)
            self._error(fault[1], "as the test wants it")
            return
        path = re.sub("^/api/datasets/", "/api/models/datasets/", path)  # the same interface
        name = r"(?P<repo>(datasets/)?[^/]+/[^/]+)"
        routes = {
            "POST /api/repos/create": self._create,
            "POST /api/validate-yaml": self._validate_card,
            rf"GET /api/models/{name}(/revision/(?P<revision>[^/]+))?": self._info,
            rf"GET /api/models/{name}/tree/(?P<revision>[^/]+)(?P<folder>/.+)?": self._tree,
            rf"POST /api/models/{name}/preupload/(?P<revision>[^/]+)": self._preupload,
            rf"POST /{name}\.git/info/lfs/objects/batch": self._lfs_batch,
            r"PUT /lfs/(?P<oid>[0-9a-f]{64})": self._lfs_put,
            rf"POST /api/models/{name}/commit/(?P<revision>[^/]+)": self._commit,
            rf"POST /api/models/{name}/branch/(?P<branch>[^/]+)": self._branch,
            rf"GET /{name}/resolve/(?P<revision>[^/]+)/(?P<path>.+)": self._file,
        }
        for pattern, handler in routes.items():
            match = re.fullmatch(pattern, f"{method} {path}")
            if match:
                handler(**match.groupdict())
                return
        self._error(404, f"the loopback Hub knows no {method} {path}")

    def _read_chunks(self) -> bytes:
        body = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    # Answers

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _error(self, status: int, message: str, code: str = "") -> None:
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self._send(status, json.dumps({"error": message}).encode(), headers)

    # Who may do what

    def _known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _may_write(self) -> bool:
        if not self._known():
            self._error(401, "Invalid username or password.")
        return self._known()

    def _readable(self, repo: str) -> Repository | None:
        found = self.hub.repositories.get(repo)
        if found is None or (found.private and not self._known()):
            self._error(404 if self._known() else 401, "Repository not found", "RepoNotFound")
            return None
        return found

    def _at(self, repo: str, revision: str | None) -> tuple[str, dict[str, bytes]] | None:
        found = self._readable(repo)
        if found is None:
            return None
        oid = found.resolve(revision or "main")
        if oid is None:
            self._error(404, f"Invalid rev id: {revision}", "RevisionNotFound")
            return None
        return oid, found.commits[oid]

    # Routes

    def _create(self) -> None:
        if not self._may_write():
            return
        wanted = json.loads(self.body)
        name = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
        url = f"{self.hub.endpoint}/{name}"
        if name in self.hub.repositories:
            body = {"error": "You already created this model repo", "url": url, "name": name}
            self._send(409, json.dumps(body).encode())
            return
        private = wanted.get("visibility") == "private" or bool(wanted.get("private"))
        self.hub.repositories[name] = Repository(private=private)
        self._json({"url": url, "name": name, "id": name})

    def _validate_card(self) -> None:
        parts = json.loads(self.body)["content"].split("---\n")
        try:
            problem = "" if isinstance(yaml.safe_load(parts[1]), dict) else "no mapping"
        except (yaml.YAMLError, IndexError) as error:
            problem = str(error)
        if problem and len(parts) > 1:
            self._error(400, f"invalid front matter: {problem}")
        else:
            self._json({"errors": [], "warnings": []})

    def _info(self, repo: str, revision: str | None) -> None:
        at = self._at(repo, revision)
        if at is not None:
            private = self.hub.repositories[repo].private
            files = [{"rfilename": path} for path in sorted(at[1])]
            self._json({"id": repo, "sha": at[0], "private": private, "siblings": files, "tags": []})

    def _tree(self, repo: str, revision: str, folder: str | None) -> None:
        at = self._at(repo, revision)
        if at is None:
            return
        within = f"{folder[1:]}/" if folder else ""
        files = [_entry(path, data) for path, data in sorted(at[1].items()) if path.startswith(within)]
        folders = [_folder(path) for path in _folders(at[1]) if path.startswith(within) and f"{path}/" != within]
        recursive = parse_qs(urlsplit(self.path).query).get("recursive", ["false"])[0].lower() in ("true", "1")
        self._json([one for one in folders + files if recursive or "/" not in one["path"][len(within) :]])

    def _preupload(self, repo: str, revision: str) -> None:
        at = self._at(repo, revision) if self._may_write() else None
        if at is not None:
            modes = []
            for path in (file["path"] for file in json.loads(self.body)["files"]):
                modes.append({"path": path, "uploadMode": "lfs" if _is_lfs(path) else "regular", "shouldIgnore": False})
                if path in at[1]:
                    modes[-1]["oid"] = _etag(path, at[1][path])
            self._json({"files": modes})

    def _lfs_batch(self, repo: str) -> None:
        if not self._may_write():
            return
        objects = []
        for wanted in json.loads(self.body)["objects"]:
            answer = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in self.hub.blobs:
                answer["actions"] = {"upload": {"href": f"{self.hub.endpoint}/lfs/{wanted['oid']}"}}
            objects.append(answer)
        self._json({"transfer": "basic", "objects": objects})

    def _lfs_put(self, oid: str) -> None:
        if sha256(self.body) != oid:
            self._error(400, "the content does not have the announced hash")
            return
        self.hub.blobs[oid] = self.body
        self._send(200, b"")

    def _commit(self, repo: str, revision: str) -> None:
        if not self._may_write() or self._at(repo, revision) is None:
            return
        lines = [json.loads(line) for line in self.body.splitlines() if line.strip()]
        changes: dict[str, bytes] = {}
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                changes[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                changes[value["path"]] = self.hub.blobs[value["oid"]]
        oid = self.hub.repositories[repo].commit(changes, lines[0]["value"]["summary"], revision)
        self._json({"commitUrl": f"{self.hub.endpoint}/{repo}/commit/{oid}", "commitOid": oid, "pullRequestUrl": None})

    def _branch(self, repo: str, branch: str) -> None:
        at = self._at(repo, None) if self._may_write() else None
        if at is None:
            return
        if branch in self.hub.repositories[repo].branches:
            self._error(409, "Reference already exists")
            return
        self.hub.repositories[repo].branches[branch] = at[0]
        self._send(201, b"")

    def _file(self, repo: str, revision: str, path: str) -> None:
        at = self._at(repo, revision)
        if at is None:
            return
        if path not in at[1]:
            self._error(404, "Entry not found", "EntryNotFound")
            return
        data = at[1][path]
        self._send(
            200,
            data,
            {"ETag": f'"{_etag(path, data)}"', "X-Repo-Commit": at[0], "Content-Type": "application/octet-stream"},
        )


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _is_lfs(path: str) -> bool:
    return path.endswith((".safetensors", ".bin")) or "tfevents" in path


def _etag(path: str, data: bytes) -> str:
    return sha256(data) if _is_lfs(path) else _git_oid(data)


def _folders(tree: dict[str, bytes]) -> list[str]:
    return sorted({str(folder) for path in tree for folder in PurePosixPath(path).parents} - {"."})


def _folder(path: str) -> dict[str, Any]:
    return {"type": "directory", "path": path, "size": 0, "oid": _git_oid(path.encode())}


def _entry(path: str, data: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": _git_oid(data)}
    if _is_lfs(path):
        entry["lfs"] = {"oid": sha256(data), "size": len(data), "pointerSize": 128}
    return entry
