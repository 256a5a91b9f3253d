"""moto's server as a program, ``python _moto.py PORT``: requests with a condition are answered one at a time.

moto looks whether an object exists and puts it then: of two creates at a time both may succeed, on a busy machine now
and then. A lock makes its conditions hold.
"""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Iterable
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import run_simple


def main(port: int) -> None:
    app, turn = DomainDispatcherApplication(create_backend_app), threading.Lock()

    def answer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if "HTTP_IF_NONE_MATCH" not in environ and "HTTP_IF_MATCH" not in environ:
            found: Iterable[bytes] = app(environ, start_response)
            return found
        # Read first: nobody waits for a client that has gone.
        environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0)))
        with turn:
            return list(app(environ, start_response))

    run_simple("127.0.0.1", port, answer, threaded=True, request_handler=MotoRequestHandler)


if __name__ == "__main__":
    main(int(sys.argv[1]))
