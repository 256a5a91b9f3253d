"""``holdfast`` and ``python -m holdfast``: the command line, also where Ctrl-C comes before it is imported."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Run the command that ``sys.argv`` names; ends the process with its status."""
    try:
        from holdfast.cli.app import main as run
        from holdfast.storage.object_store import expect_answers_soon
    except KeyboardInterrupt:
        sys.exit(130)
    expect_answers_soon()
    try:
        run()
    finally:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where a shell has it ignored
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # what takes the interpreter apart would print a traceback


if __name__ == "__main__":
    main()
