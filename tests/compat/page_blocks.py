"""Runs the Python blocks of a page, each on its own lines: a traceback then points into the page."""

from __future__ import annotations

import os
import re
import sys
from typing import Any

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run(page: str, directory: str) -> None:
    """Run all blocks of ``page``, in one namespace and in ``directory``."""
    os.chdir(directory)
    sys.path.insert(0, "")
    with open(page) as file:
        text = file.read()
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in BLOCK.finditer(text):
        above = text.count("\n", 0, block.start(1))
        exec(compile("\n" * above + block.group(1), page, "exec"), names)
