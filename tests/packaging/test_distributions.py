"""Wheel and sdist, as they are built and installed: in ``.venvs/packaging``, which `make test-packaging` makes.

Also what needs that environment: commands where no torch is installed, and pyright over the public names.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venvs" / "packaging" / "bin" / "python"
DRIVER = ROOT / "tests" / "compat" / "torch_free_commands.py"
FIXTURE = ROOT / "tests" / "fixtures" / "formats" / "0.1.0.dev7"
SOURCES = ROOT / "src" / "holdfast"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="make test-packaging makes .venvs/packaging"),
    pytest.mark.timeout(600),
]


def run(*command: object, status: int | None = 0, **environment: str) -> str:
    ended = subprocess.run(
        [str(one) for one in command],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment,
    )
    assert status in (None, ended.returncode), ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An sdist, and the wheel that was built from it."""
    out = tmp_path_factory.mktemp("built")
    run(PYTHON, "-m", "build", "--no-isolation", "-o", out, ROOT)
    return out


@pytest.fixture(scope="session")
def wheel(built: Path) -> Path:
    (found,) = built.glob("holdfast-*-py3-none-any.whl")
    return found


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that the wheel is installed into, without its dependencies."""
    into = tmp_path_factory.mktemp("installed")
    run(PYTHON, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", into, wheel)
    return into


def content(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


def files_below(directory: Path) -> set[str]:
    return {
        str(path.relative_to(directory))
        for path in directory.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    found = {name for name in content(wheel) if ".dist-info/" not in name}
    package = {f"holdfast/{name}" for name in files_below(SOURCES)}
    assert {"holdfast/py.typed", "holdfast/view/assets/page.html", "holdfast/view/assets/page.js"} <= package & found
    benchmarks = {name for name in found if name.startswith("holdfast/_bench/benchmarks/")}
    assert "holdfast/_bench/benchmarks/runner.py" in benchmarks, "`holdfast bench` works where this is installed"
    assert not [name for name in benchmarks if "/reports/" in name]
    assert found - benchmarks == package
    assert not [name for name in found if re.search(r"(^|/)(test_|conftest|tests/)|\.pyc$|\.orig$", name)]
    assert wheel.stat().st_size < 4 << 20


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    files = content(wheel)
    (info,) = {name.partition("/")[0] for name in files if ".dist-info/" in name}
    metadata = HeaderParser().parsestr(files[f"{info}/METADATA"].decode())
    assert metadata["License-Expression"] == "Apache-2.0"
    assert {f"{info}/licenses/LICENSE", f"{info}/licenses/NOTICE"} <= files.keys()
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    required = [one for one in metadata.get_all("Requires-Dist", []) if "extra ==" not in one]
    assert sorted(re.split(r"[<>=;]", one)[0] for one in required) == sorted(
        ["torch", "numpy", "msgspec", "xxhash", "safetensors", "obstore", "typer", "rich", "typing-extensions"]
    )
    assert {"view", "otel", "prometheus", "zstd", "fsspec"} <= set(metadata.get_all("Provides-Extra", []))
    assert b"holdfast = holdfast.__main__:main" in files[f"{info}/entry_points.txt"]


def test_the_sdist_builds_the_same_wheel_as_the_tree(wheel: Path, tmp_path: Path) -> None:
    run(PYTHON, "-m", "build", "--no-isolation", "--wheel", "-o", tmp_path, ROOT)
    assert content(tmp_path / wheel.name) == content(wheel)


def test_the_sdist_is_what_a_packager_needs(built: Path) -> None:
    (sdist,) = built.glob("holdfast-*.tar.gz")
    with tarfile.open(sdist) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    for name in ("pyproject.toml", "LICENSE", "NOTICE", "README.md", "CHANGELOG.md", "Makefile", "PKG-INFO"):
        assert name in names
    assert {"tests/unit/test_boxes.py", "tests/compat/frozen/public.json", "examples/demo.py"} <= names
    assert not [
        name for name in names if "__pycache__" in name or name.startswith((".venv", "out/", "benchmarks/reports"))
    ]


def test_commands_run_where_no_torch_is_installed(installed: Path, tmp_path: Path) -> None:
    assert "torch" not in run(PYTHON, "-m", "pip", "list")
    where = Path(shutil.copytree(FIXTURE, tmp_path / "places"))
    shutil.copytree(where / "root", where / "bucket")
    found = json.loads(run(PYTHON, DRIVER, where, PYTHONPATH=str(installed)))
    assert found["loaded"] == []
    assert found["package"].startswith(str(installed))
    for command, status, output, expected in found["results"]:
        assert status == expected, f"holdfast {command}: {output}"


def pyright(*arguments: object, **environment: str) -> dict[str, Any]:
    """What pyright prints as JSON; it sees the interpreter of these tests, which has torch."""
    command = (PYTHON, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, *arguments)
    found: dict[str, Any] = json.loads(run(*command, status=None, **environment))
    return found


def test_pyright_takes_the_uses_and_refuses_the_misuses() -> None:
    found = pyright("--project", ROOT / "pyproject.toml")
    assert found["summary"]["filesAnalyzed"] >= 3
    assert [one for one in found["generalDiagnostics"] if one["severity"] == "error"] == []


def public_names() -> set[str]:
    found = set()
    for name in ("holdfast", "holdfast.dcp", "holdfast.export", "holdfast.sync"):
        module = importlib.import_module(name)
        values = [getattr(module, one) for one in module.__all__]
        found |= {f"{one.__module__}.{one.__qualname__}" for one in values if hasattr(one, "__qualname__")}
    return {one for one in found if one.startswith("holdfast.")}


def test_no_public_name_lacks_an_annotation(installed: Path) -> None:
    """pyright sees neither torch nor msgspec here, so what it says of types from these isn't asked."""
    found = pyright("--verifytypes", "holdfast", "--ignoreexternal", PYTHONPATH=str(installed))["typeCompleteness"]
    public = public_names()
    symbols = [one for one in found["symbols"] if any(f"{one['name']}.".startswith(f"{name}.") for name in public)]
    assert len(symbols) > 400
    assert [one["name"] for one in symbols if one["isTypeAmbiguous"]] == []
