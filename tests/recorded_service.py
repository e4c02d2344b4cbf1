"""A server with recorded responses of the matrix service, for environments where that can't be installed."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

#: The real service's responses for a wrong cell and for a nearby one.
SHIMS = [
    {"name": "tf5", "state": "applied", "reason": "transformers 5"},
    {"name": "torch2_11", "state": "not needed", "reason": "needs torch 2.11"},
]
EVIDENCE = {
    "cell": "py312-tf5.9-torch2.11",
    "verdict": "wrong",
    "state": "failed",
    "kind": "wrong",
    "reason": "test_generate: off by 3",
    "python": "3.12.1",
    "transformers": "5.9.0",
    "torch": "2.11.0",
    "flash_attention": "none",
    "flash-attn": "none",
    "flash_attn_package": "",
    "extra": {},
    "device": "cpu",
    "run": "20261121-114502-7f3a",
    "run_label": "nightly",
    "revision": "0cddbda4d5e6",
    "attempt": 1,
    "started": "2026-11-21T11:45:09Z",
    "seconds": 61.5,
    "tests": {"passed": 70, "failed": 2, "error": 0, "skipped": 3, "xfailed": 0, "xpassed": 0, "flaky": 0, "known": 0},
    "shims": SHIMS,
    "failure": {"test": "test_generate", "error": "assert 1 == 2", "issue": ""},
    "differs": [],
}
WRONG: dict[str, Any] = {
    "asked": {
        "device": "cpu",
        "flash_attention": "none",
        "flash-attn": "none",
        "flash_attn_package": None,
        "transformers": "5.9.0",
        "torch": "2.11.0",
        "python": "3.12",
    },
    "match": "exact",
    "verdict": "wrong",
    "kind": None,
    "reason": "test_generate: off by 3",
    "minor": "wrong",
    "mixed": "",
    "closeness": "patch",
    "devices": [{"device": "cpu", "verdict": "wrong", "reason": "test_generate: off by 3"}],
    "kernels": [
        {
            "device": "cpu",
            "flash_attention": "none",
            "verdict": "wrong",
            "reason": "test_generate: off by 3",
            "mixed": "",
        }
    ],
    "counts": {"wrong": 1},
    "tested": [EVIDENCE],
    "works": None,
    "against": [],
    "refusals": [],
}
PASSED = WRONG | {"verdict": "passed", "reason": "", "tested": [EVIDENCE | {"verdict": "passed"}]}
NEAREST = WRONG | {
    "match": "nearest",
    "verdict": "unknown",
    "reason": "another patch of it was tested",
    "tested": [
        EVIDENCE | {"differs": [{"axis": "transformers", "asked": "5.9.1", "tested": "5.9.0"}]},
    ],
}


class Service:
    """
    Attributes:
        answer: the body of the response, as JSON or as bytes.
        status: the status of the response.
        older: whether it refuses the version of a FlashAttention package.
        slow: seconds before the response.
        drip: seconds between the bytes of the response.
        asked: the path, the parameters and the headers of each request.
    """

    def __init__(self, answer: Any = PASSED) -> None:
        self.answer, self.status, self.slow, self.drip = answer, 200, 0.0, 0.0
        self.older = False
        self.headers: dict[str, str] = {}
        self.asked: list[tuple[str, dict[str, str], Mapping[str, str]]] = []
        self._over = threading.Event()
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                parts = urlsplit(self.path)
                service.asked.append((parts.path, dict(parse_qsl(parts.query)), dict(self.headers)))
                service._over.wait(service.slow)
                body = service.answer if isinstance(service.answer, bytes) else json.dumps(service.answer).encode()
                try:
                    packaged = service.older and " " in service.asked[-1][1].get("flash_attn", "")
                    self.send_response(422 if packaged else service.status)
                    for name, value in {"Content-Type": "application/json", **service.headers}.items():
                        self.send_header(name, value)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    for piece in [body[i : i + 1] for i in range(len(body))] if service.drip else [body]:
                        self.wfile.write(piece)
                        self.wfile.flush()
                        service._over.wait(service.drip)
                except OSError:  # the client has disconnected
                    pass

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def stop(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
