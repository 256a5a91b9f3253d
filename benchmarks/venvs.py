"""An environment of its own for each peer whose needs clash with others', made on first use and kept.

Each lies over the runner's: what it doesn't have itself, torch above all, it takes from there. So every contender runs
the same torch, nothing large is downloaded twice, and a peer that asks for another torch doesn't get one.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.peers import Peer

PIP_DEADLINE_S = 300.0


class NotInstalled(Exception):
    """A peer's environment can't be made; the message is what pip said."""


def python_of(peer: Peer, folder: Path) -> str:
    """The interpreter to run ``peer`` with. Raises `NotInstalled`."""
    if not peer.own_environment:
        return sys.executable
    wanted = "\n".join([sys.version, sys.prefix, *peer.bare, *peer.packages])
    digest = hashlib.sha256(wanted.encode()).hexdigest()[:12]
    home = folder / f"{peer.environment}-{digest}"
    python = home / "bin" / "python"
    if (home / ".ready").exists():
        return str(python)
    try:
        venv.create(home, clear=True, with_pip=False, symlinks=True)
        site = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
        # Behind its own packages, and read as plain paths: an editable install of the runner's stays out.
        (site / "zz_runner.pth").write_text("".join(f"{path}\n" for path in sys.path if path.endswith("site-packages")))
        if peer.packages:
            _install(python, list(peer.packages))
        if peer.bare:
            _install(python, ["--no-deps", *peer.bare])
    except (OSError, subprocess.SubprocessError) as error:
        raise NotInstalled(str(error)) from error
    (home / ".ready").write_text(wanted)
    return str(python)


def _install(python: Path, what: list[str]) -> None:
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-input", *what]
    try:
        ended = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=PIP_DEADLINE_S,
            check=False,
            env=os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        )
    except subprocess.TimeoutExpired as error:
        raise NotInstalled(f"pip took more than {PIP_DEADLINE_S:g} s") from error
    if ended.returncode:
        tail = (ended.stderr or ended.stdout).strip().splitlines()[-1:]
        raise NotInstalled(f"pip install {' '.join(what)}: {' '.join(tail)}")


def version_of(python: str, peer: Peer) -> str | None:
    """What of it is installed."""
    if not peer.own_environment:
        return None
    name = (peer.bare or peer.packages)[0].partition("==")[0].partition("[")[0]
    code = f"import importlib.metadata as m; print(m.version({name!r}))"
    ended = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    return ended.stdout.strip() or None
