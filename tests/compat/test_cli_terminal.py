"""The command line on a terminal, in a pipe, and where nobody listens: statuses, messages, what is on which stream.

As processes of their own; none of them imports torch but where a test says so.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import msgspec
import pytest
from rich.cells import cell_len

import holdfast
from holdfast.cli.output import print_rows
from holdfast.format.manifest import decode_manifest, encode_manifest

SOURCE = str(Path(holdfast.__file__).parents[1])
WRITTEN = Path(__file__).parent / "frozen" / "written"
ESCAPE = "\x1b"


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    return {**kept, "PYTHONPATH": SOURCE, "PYTHONIOENCODING": "utf-8", "TERM": "xterm-256color", **more}


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "holdfast", *map(str, arguments)]


def run(*arguments: object, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=100, check=False, env=environment(**more)
    )


def on_a_terminal(arguments: list[str], columns: int, **more: str) -> tuple[int, str]:
    """Run with all three streams on a terminal of so many columns; return status and what appeared on it."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with subprocess.Popen(
        arguments, stdin=theirs, stdout=theirs, stderr=theirs, env=environment(**more), start_new_session=True
    ) as process:
        os.close(theirs)
        seen = b""
        while True:
            try:
                data = os.read(ours, 1 << 16)
            except OSError:  # EIO: the last process that had it open has ended
                break
            seen += data
        os.close(ours)
        status = process.wait(60)
    return status, seen.decode()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    shutil.copytree(WRITTEN / "checkpoint", tmp_path / "root" / "step-12")
    return tmp_path / "root"


# Pipes ------------------------------------------------------------------------------------------------------------

LISTINGS = [("ls",), ("show",), ("show", "--json"), ("show", "--shards"), ("verify",), ("watch", "--for", "0")]


@pytest.mark.parametrize("arguments", LISTINGS, ids=" ".join)
def test_a_reader_that_has_gone_is_no_traceback(root: Path, arguments: tuple[str, ...]) -> None:
    assert without_a_reader(arguments[0], root, *arguments[1:]) == (141, "")


@pytest.mark.parametrize("arguments", [(), ("--help",), ("ls", "--help"), ("--version",), ("--show-completion",)])
def test_help_whose_reader_has_gone_ends_as_other_output_does(arguments: tuple[str, ...]) -> None:
    """rich, which prints it, has sent standard output elsewhere by then."""
    assert without_a_reader(*arguments) == (141, "")
    assert without_a_reader(*arguments, TERM="dumb", NO_COLOR="1") == (141, "")


def without_a_reader(*arguments: object, **more: str) -> tuple[int, str]:
    """Run with standard output leading to a pipe that nobody reads; return status and what is on standard error."""
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.Popen(
        command(*arguments), stdout=writer, stderr=subprocess.PIPE, env=environment(**more), text=True
    )
    os.close(writer)
    said = process.communicate(timeout=100)[1]
    return process.returncode, said


@pytest.mark.parametrize("arguments", [("ls",), ("show", "--json")], ids=" ".join)
def test_a_full_disk_under_standard_output_is_a_message(root: Path, arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            command(arguments[0], root, *arguments[1:]),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=100,
            check=False,
            env=environment(),
        )
    assert ended.returncode == 1
    assert "No space left on device" in ended.stderr
    assert ended.stderr.count("\n") == 1, "one line, and no traceback"


def test_without_a_standard_output_only_the_status_tells(root: Path) -> None:
    shell = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *command("ls", root)],
        stderr=subprocess.PIPE,
        text=True,
        timeout=100,
        check=False,
        env=environment(),
    )
    assert (shell.returncode, shell.stderr) == (0, "")


def test_names_that_an_encoding_or_a_terminal_can_not_show_are_escaped(root: Path) -> None:
    (root / "step-12").rename(root / "[red]ü\n\x1b[31m")
    ended = run("ls", root, PYTHONIOENCODING="ascii")
    assert ended.returncode == 0, ended.stderr
    assert "[red]\\xfc\\n\\x1b[31m" in ended.stdout
    (entry,) = json.loads(run("ls", root, "--json", PYTHONIOENCODING="ascii").stdout)["entries"]
    assert entry["name"] == "[red]ü\n\x1b[31m"
    status, seen = on_a_terminal(command("show", root), 80)
    assert status == 0
    assert ESCAPE not in seen
    assert "[red]ü\\n\\x1b[31m" in seen


def test_warnings_of_the_log_are_escaped_too(root: Path) -> None:
    (root / "[red]\x1b[31m\u202e").mkdir()
    (root / "[red]\x1b[31m\u202e" / "holdfast.json").write_text("{}")
    status, seen = on_a_terminal(command("diff", root, root, "--structure"), 80)
    assert status == 0
    assert f"holdfast: {root}/[red]\\x1b[31m\\u202e is passed over: " in seen
    assert not {ESCAPE, "\u202e"} & set(seen)


# Completion -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["holdfast", "re"], {"recover", "report"}),
        (["holdfast", "ls", "--"], {"--json", "--help"}),
        (["holdfast", "convert", "a", "b", "--to", ""], {"dcp", "torch", "hf"}),
        (["holdfast", "[/]", "--j"], set()),
    ],
)
def test_a_shell_is_told_what_may_come_next(words: list[str], offered: set[str]) -> None:
    asked = {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    ended = run(_HOLDFAST_COMPLETE="complete_bash", **asked)
    assert (ended.returncode, set(ended.stdout.split()), ended.stderr) == (0, offered, "")


def test_help_and_completion_name_the_command_however_it_was_started() -> None:
    assert "Usage: holdfast ls [OPTIONS]" in run("ls", "--help").stdout
    script = run(_HOLDFAST_COMPLETE="source_bash").stdout
    assert "_HOLDFAST_COMPLETE=complete_bash" in script
    assert script.rstrip().endswith(" holdfast")


# Terminals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_tables_are_the_same_on_terminals_of_any_width_and_in_a_pipe(root: Path, columns: int) -> None:
    for arguments in (("show", root, "--filter", "optimizer.*"), ("ls", root)):
        status, seen = on_a_terminal(command(*arguments), columns)
        assert status == 0
        assert ESCAPE not in seen
        piped = run(*arguments, COLUMNS=str(columns)).stdout
        ages = re.compile(r"\d+ (s|min|h|d)\b *")
        assert ages.sub("", seen.replace("\r\n", "\n")) == ages.sub("", piped)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_columns_stand_where_a_terminal_has_them(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some characters take two columns, some none, and some are escaped."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="backslashreplace")
    monkeypatch.setattr(sys, "stdout", stream)
    names = ("plain", "漢字", "combined e\u0301", "[/]\x1b[2J", "😀", "x" * 40)
    print_rows(("name", "size"), [(name, str(10**number)) for number, name in enumerate(names)], right=(1,))
    stream.seek(0)
    lines = stream.read().splitlines()
    assert len(lines) == 7
    assert len(set(map(cell_len, lines))) == 1


_SLOW = """
import sys, time
from holdfast.cli.output import progress_bar
pause, steps = float(sys.argv[1]), int(sys.argv[2])
with progress_bar("/[red]a[/] {x}\x1b[31m/path/that/is/longer/than/the/terminal/is/wide/漢字漢字/step-1") as progress:
    for number in range(steps + 1):
        if progress is not None:
            progress(number << 24, steps << 24)
        time.sleep(pause)
print("done", progress is not None)
"""
_NO_SIGNS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


ASCII = {"LC_ALL": "POSIX", "PYTHONIOENCODING": "ascii"}


@pytest.mark.parametrize("columns", [40, *(pytest.param(n, marks=pytest.mark.slow) for n in (60, 200))])
@pytest.mark.parametrize("locale", [{}, ASCII], ids=["utf-8", "ascii"])
def test_a_bar_has_bytes_per_second_and_time_left_on_one_line(columns: int, locale: dict[str, str]) -> None:
    status, seen = on_a_terminal([sys.executable, "-c", _SLOW, "0.1", "20"], columns, **locale)
    assert status == 0
    drawn = _NO_SIGNS.sub("", seen)
    assert re.search(r"\d MiB/s +0:00:0\d", drawn)
    lines = [line for line in re.split(r"[\r\n]+", drawn) if "MiB" in line]
    assert lines
    assert max(map(cell_len, lines)) <= columns, "one that wraps would leave its first line behind"
    assert ("漢字/step-1" in drawn if not locale else "\\u6f22\\u5b57/step-1" in drawn) == (columns > 60)
    assert ("[red]a[/] {x}\\x1b[31m" in drawn) == (columns == 200), "and is no markup, and nothing to fill in"
    assert drawn.count("\n") == 2, "and there is one line of it"
    assert drawn.endswith("done True\r\n")


def test_a_bar_follows_the_width_of_its_terminal() -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 200, 0, 0))
    arguments = [sys.executable, "-c", _SLOW, "0.1", "20"]
    with subprocess.Popen(arguments, stdout=theirs, stderr=theirs, env=environment()) as process:
        os.close(theirs)
        before = _until(ours, b"MiB/s")
        fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 44, 0, 0))
        after = _until(ours, b"done True\r\n")
        assert process.wait(60) == 0
        os.close(ours)
    lines = [_NO_SIGNS.sub("", text).splitlines() for text in (before, after)]
    assert max(map(cell_len, lines[0])) > 150
    drawn = [line for line in lines[1] if "MiB" in line]
    while cell_len(drawn[0]) > 44:  # was under way
        del drawn[0]
    assert max(map(cell_len, drawn)) <= 44
    assert len(drawn) > 3
    assert all("MiB/s" in line for line in drawn)


def _until(terminal: int, sign: bytes) -> str:
    seen = b""
    while sign not in seen:
        seen += os.read(terminal, 1 << 16)
    return seen.decode()


def test_a_terminal_that_can_not_draw_shows_no_bar() -> None:
    assert on_a_terminal([sys.executable, "-c", _SLOW, "0.1", "8"], 80, TERM="dumb") == (0, "done False\r\n")


def test_there_is_no_bar_for_what_is_quick_and_none_in_a_pipe() -> None:
    assert on_a_terminal([sys.executable, "-c", _SLOW, "0", "20"], 80) == (0, "done True\r\n")
    piped = subprocess.run(
        [sys.executable, "-c", _SLOW, "0", "20"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=environment(),
    )
    assert (piped.stdout, piped.stderr) == ("done False\n", "")


@pytest.mark.parametrize("arguments", [("watch", "--json"), ("view", "--port", "0", "--json")], ids=" ".join)
def test_an_interrupt_is_status_130(root: Path, arguments: tuple[str, ...]) -> None:
    with subprocess.Popen(
        command(arguments[0], root, *arguments[1:]),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["command"] == arguments[0]
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        rest, said = process.communicate(timeout=60)
    assert (process.returncode, rest) == (130, "")
    assert "Traceback" not in said


# Statuses and messages --------------------------------------------------------------------------------------------

COMMANDS = ["ls", "show", "verify", "diff", "cat", "export", "convert", "prune", "recover", "view", "report", "watch"]
_REST = {"cat": ["x"], "convert": ["out", "--to", "dcp"], "export": ["out"], "prune": ["--last", "1"]}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_path_that_is_not_there_is_misuse_of_every_command(name: str, tmp_path: Path) -> None:
    missing = tmp_path / "[red]nowhere"
    rest = [missing] if name == "diff" else _REST.get(name, [])
    ended = run(name, missing, *rest, "--json")
    assert ended.returncode == 2, ended.stderr
    found = json.loads(ended.stdout)
    assert found["error"]["kind"] in ("ConfigError", "CheckpointNotFound")
    assert str(missing) in found["error"]["message"]
    assert ended.stderr == f"holdfast: {found['error']['message']}\n"
    assert not list(tmp_path.iterdir()), "and nothing is written"


@pytest.mark.parametrize(
    ("arguments", "says", "see"),
    [
        (("sl", "ROOT"), "No such command 'sl'", ""),
        (("--\u202e[/]\x1b[2J",), "--\\u202e[/]\\x1b[2J", ""),
        (("ls",), "PATH", "ls "),
        (("ls", "ROOT", "[red]x[/red]"), "([red]x[/red])", "ls "),
        (("ls", "ROOT", "--jsno"), "--jsno", "ls "),
        (("show", "ROOT", "--step", "[/]"), "--step", "show "),
        (("convert", "ROOT", "out"), "--to", "convert "),
        (("convert", "ROOT", "out", "--to", "[/]"), "'dcp', 'torch', 'hf'", "convert "),
        (("view", "ROOT", "--port", "99999"), "65535", "view "),
        (("bench", "--only", "[/]"), "'[/]'", "bench "),
    ],
)
def test_a_command_line_that_is_wrong_is_told_on_one_line(
    arguments: tuple[str, ...], says: str, see: str, root: Path
) -> None:
    status, seen = on_a_terminal(command(*[str(root) if word == "ROOT" else word for word in arguments]), 40)
    assert status == 2
    assert seen.startswith("holdfast: ")
    assert says in seen
    assert seen.endswith(f"see `holdfast {see}--help`\r\n")
    assert (seen.count("\n"), ESCAPE in seen) == (1, False)


def test_without_a_command_help_is_printed_and_it_is_misuse() -> None:
    ended = run()
    assert (ended.returncode, ended.stderr) == (2, "")
    assert "Usage: holdfast [OPTIONS] COMMAND" in ended.stdout


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("", "the path is empty"),
        ("ftp://host/x", "s3://bucket/prefix"),
        ("file", "`holdfast convert`"),
        ("s3:/bucket/x", "lost a slash"),
        ("dangling", "dangling is a link to nowhere, which doesn't exist"),
    ],
)
def test_a_path_that_can_not_be_one_is_told_what_could(path: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "dangling").symlink_to("nowhere")
    ended = run("ls", tmp_path / path if path in ("file", "dangling") else path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert says in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_a_hugging_face_directory_of_others_is_shown(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(WRITTEN / "export", model, ignore=shutil.ignore_patterns("holdfast.json", "*.report"))
    assert "`holdfast show`" in run("ls", model).stdout
    ended = run("show", model)
    assert ended.returncode == 0, ended.stderr
    assert "another program" in ended.stdout


@pytest.fixture
def mixed(root: Path) -> Path:
    """A root with steps of this release, 12 and 14, and of a newer one: 13 tells which, 15 doesn't."""
    for step in (13, 14, 15):
        shutil.copytree(root / "step-12", root / f"step-{step}")
    for step, told in ((13, {"format": 9, "versions": {"holdfast": "7.5.0"}}), (14, {}), (15, {"format": 9})):
        path = root / f"step-{step}" / "holdfast.json"
        written = decode_manifest(path.read_bytes(), path="")
        path.write_bytes(encode_manifest(msgspec.structs.replace(written, name=f"step-{step}", step=step, **told)))
    return root


def test_a_step_of_a_newer_release_is_listed_as_that_and_never_pruned(mixed: Path) -> None:
    ended = run("ls", mixed)
    assert ended.returncode == 1
    assert "corrupt" not in ended.stdout
    assert "it was written by Holdfast 7.5.0, and nothing is wrong with it" in ended.stderr
    states = {row["step"]: row["state"] for row in json.loads(run("ls", mixed, "--json").stdout)["entries"]}
    assert (states[13], states[15]) == ("newer", "newer")
    for dry in (["--dry-run"], []):
        assert run("prune", mixed, "--last", "0", *dry).returncode == 0
        assert (mixed / "step-13" / "holdfast.json").exists()
        assert (mixed / "step-15" / "holdfast.json").exists()
    assert not (mixed / "step-12").exists(), "what it can read goes, as the rules say"


def test_verify_goes_on_after_a_step_of_a_newer_release(mixed: Path) -> None:
    (mixed / ".holdfast").mkdir()
    (mixed / ".holdfast" / "journal.jsonl").touch()
    ended = run("verify", mixed)
    assert (ended.returncode, ended.stderr) == (1, "")
    told = {Path(line.partition(": ")[0]).name: line for line in ended.stdout.splitlines() if line[0] != " "}
    assert set(told) == {"step-12", "step-13", "step-14", "step-15"}
    assert all(": fine (" in told[name] for name in ("step-12", "step-14"))
    assert all(told[name].endswith(": newer, not verified") for name in ("step-13", "step-15"))
    assert "pip install 'holdfast>=7.5.0'" in ended.stdout
    found = json.loads(run("verify", mixed, "--json").stdout)
    rows = {row["step"]: row for row in found["checkpoints"]}
    assert found["ok"] is False
    assert {step: (row["state"], row["ok"]) for step, row in rows.items()} == {
        12: ("verified", True),
        13: ("newer", None),
        14: ("verified", True),
        15: ("newer", None),
    }
    assert (rows[12]["error"], rows[13]["problems"]) == (None, [])
    assert "7.5.0" in rows[13]["error"]
    noted = {json.loads(line)["name"] for line in (mixed / ".holdfast" / "journal.jsonl").read_text().splitlines()}
    assert noted == {"step-12", "step-14"}, "what wasn't read wasn't verified"


@pytest.mark.parametrize(
    "arguments", [("ls",), ("verify",), ("show",), ("cat", "x"), ("convert", "out", "--to", "dcp")], ids=" ".join
)
def test_what_a_newer_release_wrote_is_no_misuse_of_any_command(arguments: tuple[str, ...], mixed: Path) -> None:
    ended = run(arguments[0], mixed / "step-13", *arguments[1:])
    assert ended.returncode == 1
    assert "pip install 'holdfast>=7.5.0'" in ended.stdout + ended.stderr


def test_verify_goes_on_after_a_format_that_no_release_writes(mixed: Path) -> None:
    path = mixed / "step-14" / "holdfast.json"
    written = decode_manifest(path.read_bytes(), path="")
    path.write_bytes(encode_manifest(msgspec.structs.replace(written, format=-1)))
    found = json.loads(run("verify", mixed, "--json").stdout)
    rows = {row["step"]: row for row in found["checkpoints"]}
    assert (rows[12]["ok"], rows[14]["ok"], len(rows[14]["problems"])) == (True, False, 1)


# A hundred thousand tensors ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("large") / "root"
    maker = [sys.executable, str(Path(__file__).parents[1] / "view" / "large_root.py"), str(root)]
    sizes = ["--steps", "2", "--whole", "2", "--ranks", "8", "--cuts", "1"]
    subprocess.run([*maker, *sizes], timeout=100, check=True, env=environment())
    return root


@pytest.mark.parametrize(
    ("arguments", "status", "lines"),
    [
        (("ls",), 0, 3),
        (("show",), 0, 100_000),
        (("show", "--json"), 0, 100_000),
        (("diff", "--step", "500", "--other-step", "1000", "--structure"), 1, 3),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_hundred_thousand_tensors_take_a_second(
    large: Path, arguments: tuple[str, ...], status: int, lines: int
) -> None:
    """Of the processor's time, since others use the machine; three times as much is allowed."""
    paths = [large, large] if arguments[0] == "diff" else [large]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = run(arguments[0], *paths, *arguments[1:])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert ended.returncode == status, ended.stderr
    assert ended.stdout.count("\n") >= lines
    assert (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime) < 3.0


def test_only_the_module_of_the_command_that_is_named_is_imported(root: Path) -> None:
    told = "import sys; from holdfast.cli.app import main; sys.argv = ['holdfast', 'ls', sys.argv[1]]\ntry: main()\n"
    told += "finally: print(*(name for name in sys.modules if name.startswith('holdfast.cli.')), file=sys.stderr)"
    ended = subprocess.run(
        [sys.executable, "-c", told, str(root)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=environment(),
    )
    assert set(ended.stderr.split()) == {f"holdfast.cli.{name}" for name in ("app", "ls", "output")}
