"""A Store in a process of its own that can be stopped, for tests of what that costs others."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_CODE = """
import sys, torch.distributed as dist
from datetime import timedelta
port, limit = int(sys.argv[1]), timedelta(seconds=5)
store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=limit)
print("up", flush=True)
sys.stdin.read()
"""


class Host:
    """Listens on ``port`` until it is closed."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CODE, str(self.port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"up\n"

    def store(self) -> Any:
        return dist.TCPStore("127.0.0.1", self.port, is_master=False, timeout=timedelta(seconds=60))

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
