"""Implement ``holdfast view``: serve the page of a root live on loopback, read-only, until Ctrl-C."""

from __future__ import annotations

import importlib.util
from typing import Annotated

import typer

from holdfast.cli.output import AsJson, print_line, shown
from holdfast.cli.report import root_of
from holdfast.errors import ConfigError


def view(
    path: Annotated[str, typer.Argument(metavar="ROOT", help="A directory or URL of checkpoints.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 for a free one.")] = 8765,
    as_json: AsJson = False,  # noqa: FBT002
) -> None:
    """Serve the page of `holdfast report` live at http://127.0.0.1:PORT: it follows a running job, and reads values.

    Read-only, for this machine's own browsers; from elsewhere: ssh -L 8765:127.0.0.1:8765 HOST.
    """
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"holdfast view needs {' and '.join(missing)}: pip install 'holdfast[view]'; holdfast report needs neither"
        )
    from holdfast.view.server import listen, serve

    root = root_of(path)
    with listen(port) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        if as_json:
            print_line("view", path=root, url=url)
        else:
            typer.echo(f"{shown(root)}: {url}  (Ctrl-C ends it)")
        serve(root, listener)
