"""One engine process in its life, and the thread that listens to it. Torch-free; runs in the trainer.

    launched -> ready -> dead          a dead link stays dead; the client makes a new one

Guarantees: the thread ends with the process, and by then has reaped it and closed what it held; `death` is set after
that, once, so whoever sees it knows that the process does nothing any more, unless its ``exitcode`` is None: killed,
but in a system call that doesn't end. An engine that is silent for too long,
speaks nonsense, or is of another version is killed. Every message is passed on in order, `Owner.heard` before the next.
"""

from __future__ import annotations

import select
import threading
import time
from typing import TYPE_CHECKING, Final, Protocol

from holdfast._version import __version__
from holdfast.engine import messages
from holdfast.engine.wire import FrameError, Inbox, ToTrainer, send

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.engine.launch import Process
    from holdfast.errors import EngineDied

START_S: Final = 30.0
"""How long an engine may take to say that it is ready, on a node that is busy importing."""
LINGER_S: Final = 2.0
"""How long a process whose socket is closed may take to end by itself."""
_POLL_S: Final = 0.5


class Owner(Protocol):
    """Who is told what a link hears; called on the link's thread."""

    def heard(self, link: Link, message: ToTrainer) -> None: ...

    def expects_beats(self, link: Link) -> bool:
        """Whether an attempt is in work there: only then silence means something."""
        ...

    def died(self, error: EngineDied) -> None:
        """The link's `death` is set; what it was doing is lost."""
        ...


class Link:
    """See the module. Made with a process that was just launched; `listen` starts its thread."""

    def __init__(self, process: Process, owner: Owner, *, silence_s_max: float) -> None:
        self._process = process
        self._owner = owner
        self._silence_s_max = silence_s_max
        self._last_heard = time.monotonic()
        self._ending: str | None = None
        self._thread = threading.Thread(target=self._live, name=f"holdfast-engine-{process.pid}", daemon=True)
        self.pid = process.pid
        self.ready = False
        self.death: EngineDied | None = None

    @property
    def usable(self) -> bool:
        """Neither dead nor being ended."""
        return self.death is None and self._ending is None

    def listen(self) -> None:
        """Start the thread. Raises `RuntimeError` where the system has none left; the process is then gone."""
        try:
            self._thread.start()
        except RuntimeError:
            self._process.reap(lambda: "could not be listened to", linger_s=0)
            raise

    def expect(self) -> None:
        """From now on silence counts: an attempt was handed over."""
        self._last_heard = time.monotonic()

    def send(self, message: messages.Message, fds: Sequence[int] = ()) -> bool:
        """Send a message; False (and the process is being ended) if it can't be. One sender at a time.

        Takes at most the time an engine may be silent. Raises `FrameError` for a message that is too large.
        """
        try:
            send(self._process.sock, message, fds, timeout_s=self._silence_s_max if self.ready else START_S)
        except FrameError:
            raise
        except TimeoutError:
            self.end("stopped reading")
            return False
        except (OSError, ValueError):  # ValueError: the thread has closed the socket meanwhile
            self.end("closed its socket")
            return False
        return True

    def end(self, reason: str) -> None:
        """Kill the process, without waiting: its thread reaps it and tells everyone ``reason``."""
        self._ending = self._ending or reason
        self._process.kill()

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of the thread; True if it has ended."""
        self._thread.join(max(0.0, timeout_s))
        return not self._thread.is_alive()

    def abandon(self) -> None:
        """In a forked child: give up the socket, taking no lock (its holder may not exist here)."""
        self._process.abandon()

    def _live(self) -> None:
        try:
            reason = self._listen_until_end()
        except Exception as error:  # noqa: BLE001 - a bug here must not leave anyone waiting
            reason = f"sent what can't be handled ({type(error).__name__}: {error})"
            self._process.kill()
        death = self._process.reap(lambda: self._ending or reason, linger_s=LINGER_S)
        self.death = death
        self._owner.died(death)

    def _listen_until_end(self) -> str:
        inbox: Inbox[ToTrainer] = Inbox(self._process.sock, ToTrainer)
        poll = select.poll()
        poll.register(self._process.sock, select.POLLIN)
        while True:
            if not poll.poll(_POLL_S * 1000):
                # Judged only when there is nothing to read: a trainer that stood still itself finds beats here.
                reason = None if self._process.running() else "ended"
                reason = reason or self._too_silent()
                if reason is not None:
                    self._process.kill()
                    return reason
                continue
            try:
                received = inbox.receive()
            except FrameError as error:
                self._process.kill()
                return f"sent a bad frame ({error})"
            except OSError:
                return "ended"
            if received is None:
                return "ended"
            self._last_heard = time.monotonic()
            for item in received:
                if isinstance(item.message, messages.Ready):
                    if item.message.version != __version__:
                        self._process.kill()
                        return f"is version {item.message.version}, not {__version__}: the package was changed under us"
                    self.ready = True
                self._owner.heard(self, item.message)

    def _too_silent(self) -> str | None:
        silence_s = time.monotonic() - self._last_heard
        if not self.ready:
            return f"did not start within {START_S:g} s" if silence_s > START_S else None
        if silence_s > self._silence_s_max and self._owner.expects_beats(self):
            return f"stopped answering for {silence_s:.1f} s with an attempt in work"
        return None
