"""An HTTP server with the requests of the hub's API that downloads use."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import unquote, urlsplit

API = re.compile(r"/api/models/([\w.-]+/[\w.-]+)(?:/(revision|tree)/([^/]+)(?:/(.+))?)?")
FILE = re.compile(r"/([\w.-]+/[\w.-]+)/resolve/([^/]+)/(.+)")


@dataclass
class Repository:
    """A model of the hub, with one commit for each version of its files."""

    commits: dict[str, Mapping[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    token: str = ""
    """The access token that requests for the model must have; empty for a public model."""
    is_gated: bool = False
    """Whether only the list of files is public."""
    claimed_sizes: dict[str, int] = field(default_factory=dict)
    """File sizes that the hub reports instead of the real sizes."""

    def publish(self, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Adds a commit with these files; returns its hash."""
        commit = hashlib.sha1(json.dumps(sorted(files.items()), default=repr).encode()).hexdigest()
        self.commits[commit] = files
        self.refs[branch] = commit
        return commit


@dataclass(frozen=True)
class Asked:
    """A request that the hub has received."""

    method: str
    path: str
    range: str
    """The header ``Range``; empty if it is missing."""


class HubServer:
    """A running hub, at a port of this machine."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.cuts: dict[str, int] = {}
        """For each file: the number of bytes after which the file's next download is cut."""
        self.broken: set[str] = set()
        """Files whose downloads fail."""
        self.requests: list[Asked] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def add(self, name: str, files: Mapping[str, bytes], **options: Any) -> Repository:
        """Adds a model with one commit."""
        self.repositories[name] = Repository(**options)
        self.repositories[name].publish(files)
        return self.repositories[name]

    def downloads(self, file: str) -> list[Asked]:
        """The downloads of a file."""
        return [one for one in self.requests if one.method == "GET" and one.path.endswith(file)]

    def __enter__(self) -> HubServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler(hub: HubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def _answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append(Asked(self.command, path, self.headers.get("Range", "")))
            api, file = API.fullmatch(path), FILE.fullmatch(path)
            match = api or file
            repository = hub.repositories.get(match[1]) if match else None
            if match is None or repository is None or not self._may_read(repository):
                # The hub does not say whether a model is private or does not exist.
                self._send(401, b"", {"X-Error-Message": "Invalid username or password."})
                return
            revision = (api[3] if api else match[2]) or "main"
            commit = repository.refs.get(revision, revision)
            if commit not in repository.commits:
                self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            elif file is not None:
                self._file(repository, commit, file[3])
            elif match[2] == "tree" and match[4]:  # Models of this hub have no folders.
                self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            elif match[2] == "tree":
                self._json(
                    [_listed(*one, repository) for one in repository.commits[commit].items()]
                )
            else:
                self._json({"id": match[1], "sha": commit})

        def _may_read(self, repository: Repository) -> bool:
            given = self.headers.get("Authorization", "")
            return not repository.token or given == f"Bearer {repository.token}"

        def _file(self, repository: Repository, commit: str, path: str) -> None:
            content = repository.commits[commit].get(path)
            headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
            if repository.is_gated:
                self._send(403, b"", headers | {"X-Error-Code": "GatedRepo"})
            elif content is None:
                self._send(404, b"", headers | {"X-Error-Code": "EntryNotFound"})
            elif self.command == "GET" and path in hub.broken:
                self._send(500, b"", headers)
            else:
                size = repository.claimed_sizes.get(path, len(content))
                etag = hashlib.sha256(content).hexdigest()
                headers |= {"ETag": f'"{etag}"', "X-Linked-Size": str(size)}
                self._part(path, content, headers)

        def _part(self, path: str, content: bytes, headers: dict[str, str]) -> None:
            wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
            start = int(wanted[1]) if wanted else 0
            if wanted:
                headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            length = hub.cuts.pop(path, None) if self.command == "GET" else None
            self._send(206 if wanted else 200, content[start:], headers, length)

        def _json(self, value: object) -> None:
            self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def _send(
            self, status: int, body: bytes, headers: dict[str, str], cut: int | None = None
        ) -> None:
            """Sends an answer. ``cut``: the number of bytes of the body after which the connection
            is closed."""
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body[:cut])
            if cut is not None:
                self.close_connection = True

    return Handler


def _listed(path: str, content: bytes, repository: Repository) -> dict[str, Any]:
    """A file in the list of a commit's files."""
    size = repository.claimed_sizes.get(path, len(content))
    return {"type": "file", "path": path, "size": size, "oid": hashlib.sha1(content).hexdigest()}
