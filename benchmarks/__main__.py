"""``python -m benchmarks``: the same as ``holdfast bench``, without the package's command line."""

from __future__ import annotations

import sys

from benchmarks.runner import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
