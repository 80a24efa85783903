"""A hub on the loopback interface: what fetching a file takes of the protocols of Hugging Face and ModelScope."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Serves ``repositories``: name -> {file: bytes}, each with the one branch main, at :data:`COMMIT`.

    Attributes:
        gated: names of repositories whose files want a token.
        cut: of a large file, only so many bytes are sent, once; then the connection ends, or stands still.
        stands_still: whether it does; then always.
        etags: file -> what is said instead of its digest.
        gets: (path, range) of every GET of a file's content.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()
        self.cut: int | None = None
        self.stands_still = False
        self.etags: dict[str, str] = {}
        self.gets: list[tuple[str, str | None]] = []
        self.released = threading.Event()
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def environment(self, cache) -> dict[str, str]:
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": ""}

    def close(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *arguments):
        pass

    def do_HEAD(self):
        self._answer(body=False)

    def do_GET(self):
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        if self.path.startswith("/api/v1/models/"):
            return self._modelscope()
        parts = unquote(self.path.split("?")[0]).strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            return self._about("/".join(parts[2:4]), parts[5] if len(parts) > 5 else "main")
        if len(parts) < 5 or parts[2] != "resolve":  # what a version of the library asks besides
            return self._refuse(404, "EntryNotFound")
        name, revision, file = "/".join(parts[:2]), parts[3], "/".join(parts[4:])
        trouble = self._trouble(name, revision)
        if trouble is None and name in self.hub.gated and "Authorization" not in self.headers:
            trouble = (401, "GatedRepo")
        if trouble is None and file not in self.hub.repositories[name]:
            trouble = (404, "EntryNotFound")
        if trouble is not None:
            return self._refuse(*trouble)
        content = self.hub.repositories[name][file]
        large = file.endswith(".safetensors")
        digest = (hashlib.sha256(content) if large else hashlib.sha1(b"blob %d\0" % len(content) + content)).hexdigest()
        digest = self.hub.etags.get(file, digest)
        given = self.headers.get("Range")
        begin = int(given.split("=")[1].split("-")[0]) if given else 0
        if body:
            self.hub.gets.append((file, given))
        self.send_response(206 if given else 200)
        self.send_header("ETag", f'"{digest}"')
        self.send_header("X-Linked-Etag", f'"{digest}"')
        self.send_header("X-Linked-Size", str(len(content)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        if given:
            self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - begin))
        self.end_headers()
        if not body:
            return None
        if large and self.hub.cut is not None and self.hub.cut < len(content) - begin:
            self.wfile.write(content[begin : begin + self.hub.cut])
            self.wfile.flush()
            if self.hub.stands_still:
                self.hub.released.wait()
            self.hub.cut = None
            self.close_connection = True
            return None
        self.wfile.write(content[begin:])
        return None

    def _modelscope(self) -> None:
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        parts = url.path.split("/")[4:]
        name, files = "/".join(parts[:2]), self.hub.repositories.get("/".join(parts[:2]), {})
        if name == "owner/broken":
            return self._refuse(500, "Broken")
        if name in self.hub.gated and not any("token" in str(value).lower() for value in self.headers.values()):
            return self._refuse(403, "GatedRepo")
        if not files or query.get("Revision", "master") != "master":
            return self._refuse(404, "NotFound")
        if parts[2:] == ["repo", "files"]:
            listed = [
                {"Path": file, "Type": "blob", "Size": len(content),
                 "Sha256": self.hub.etags.get(file, hashlib.sha256(content).hexdigest())}
                for file, content in files.items()
            ]  # fmt: skip
            return self._send(json.dumps({"Code": 200, "Success": True, "Data": {"Files": listed}}).encode())
        self.hub.gets.append((query["FilePath"], self.headers.get("Range")))
        return self._send(files[query["FilePath"]])

    def _send(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _about(self, name: str, revision: str) -> None:
        trouble = self._trouble(name, revision)
        if trouble is not None:
            return self._refuse(*trouble)
        files = [{"rfilename": file} for file in self.hub.repositories[name]]
        text = json.dumps({"id": name, "modelId": name, "sha": COMMIT, "siblings": files, "tags": [], "private": False})
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())
        return None

    def _trouble(self, name: str, revision: str):
        if name == "owner/broken":
            return 500, "Broken"
        if name not in self.hub.repositories:
            return 401, "RepoNotFound"  # what the real one says to who has no token
        return None if revision in ("main", COMMIT) else (404, "RevisionNotFound")

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", "no")
        self.send_header("Content-Length", "0")
        self.end_headers()
