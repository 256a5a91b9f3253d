"""googleapis/storage-testbench on a port of loopback, with the headers that obstore wants and its XML API lacks.

    python run_testbench.py PORT

Conditions are the testbench's own: compared and carried out under one lock. ETag and Last-Modified are made up here;
neither is in a condition on Google's.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.handlers import format_date_time


def with_headers(app: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    """Return ``app`` with an ETag and a time on answers that lack them."""

    def answer(environ: Any, start_response: Any) -> Iterable[bytes]:
        def start(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            have = {name.lower(): value for name, value in headers}
            tag = have.get("x-goog-generation", "stored")
            more = {"ETag": f'"{tag}"', "Last-Modified": format_date_time(time.time())}
            lacking = [(name, value) for name, value in more.items() if name.lower() not in have]
            return start_response(status, [*headers, *lacking], *rest)

        return app(environ, start)

    return answer


if __name__ == "__main__":
    # In an environment that nothing here depends on.
    app = with_headers(importlib.import_module("testbench").run())
    importlib.import_module("waitress").serve(app, host="127.0.0.1", port=int(sys.argv[1]), threads=32)
