"""Runs a command of ``holdfast`` in a process that has imported torch before: a child of a nursery."""

from __future__ import annotations

import os
import sys

from holdfast.__main__ import main
from holdfast.cli import app as _app  # noqa: F401 - so that no child imports it


def run(arguments: list[str], directory: str | None) -> None:
    """Be ``holdfast ARGUMENTS`` in ``directory``, or where the tests run."""
    if directory is not None:
        os.chdir(directory)
    sys.argv = ["holdfast", *arguments]
    main()
