"""Run commands of the command line where there is no torch, on what lies in a directory: for two tests.

    python torch_free_commands.py DIRECTORY [--block]

``DIRECTORY`` holds ``root``, ``export``, ``versions``, and ``bucket``, which is read as ``file://``. ``--block`` makes
an import of torch fail, where it is installed. Prints one JSON list of [command line, exit status, output].
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path

BLOCKED = ("torch", "transformers")


def commands(where: Path) -> list[tuple[list[str], int]]:
    """Return what is run, each with the exit status it must have."""
    root, bucket = str(where / "root"), f"file://{where / 'bucket'}"
    export, versions = str(where / "export"), str(where / "versions")
    found: list[tuple[list[str], int]] = []
    for place in (root, bucket):
        one, other = f"{place}/step-10", f"{place}/step-20"
        found += [
            *(([command, place], 0) for command in ("ls", "show", "verify")),
            *(([command, place, "--json"], 0) for command in ("ls", "show", "verify")),
            *(([command, one], 0) for command in ("show", "verify")),
            (["report", place, "-o", str(where / "report.html")], 0),
            (["diff", one, other, "--structure"], 1),
            (["diff", one, one, "--structure"], 0),
            (["diff", one, other], 2),  # values need torch, and that is said
            (["cat", other, "half"], 2),
            (["prune", place, "--last", "1", "--dry-run"], 0),
            (["prune", place, "--last", "1"], 0),
            (["recover", place], 0),
        ]
    for place in (export, versions):
        found += [([command, place], 0) for command in ("ls", "verify")]
    found += [
        (["show", export], 0),
        (["show", f"{versions}/version-3"], 0),
        (["report", versions, "-o", str(where / "report.html")], 0),
        (["prune", versions, "--last", "1", "--name-template", "version-{step}"], 0),
        (["--version"], 0),
    ]
    return found


def run(arguments: list[str]) -> tuple[int, str]:
    """Run one command as `holdfast` does; its exit status, and what it wrote."""
    from holdfast.cli.app import main

    sys.argv = ["holdfast", *arguments]
    written = io.StringIO()
    with contextlib.redirect_stdout(written), contextlib.redirect_stderr(written):
        try:
            main()
        except SystemExit as ended:
            return int(ended.code or 0), written.getvalue()
    return 0, written.getvalue()


def main(where: Path, *, block: bool) -> None:
    if block:
        sys.modules.update(dict.fromkeys(BLOCKED))  # None makes an import of it fail
    for name in BLOCKED:
        with contextlib.suppress(ModuleNotFoundError):
            __import__(name)
            raise SystemExit(f"{name} can be imported")
    results = [[" ".join(arguments), *run(arguments), expected] for arguments, expected in commands(where)]
    loaded = [name for name in sys.modules if name.partition(".")[0] in BLOCKED and sys.modules[name] is not None]
    import holdfast

    print(json.dumps({"results": results, "loaded": loaded, "package": holdfast.__file__}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), block="--block" in sys.argv[2:])
