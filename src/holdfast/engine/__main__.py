"""``python -m holdfast.engine FD``: run an engine on the inherited socket FD. Torch-free; see `process`."""

from __future__ import annotations

import sys

from holdfast.engine.process import main

if __name__ == "__main__":
    if len(sys.argv) != 2 or not sys.argv[1].isdecimal():
        sys.stderr.write("holdfast.engine is started by Holdfast itself, with the number of its socket\n")
        sys.exit(2)
    main(int(sys.argv[1]))
