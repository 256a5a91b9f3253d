"""The house rules find what they are there for, and nothing in code that keeps them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "check_house.py"


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, looking at an empty project of its own."""
    spec = importlib.util.spec_from_file_location("check_house", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "check_house", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "PACKAGE", tmp_path / "src" / "holdfast")
    (tmp_path / "src" / "holdfast").mkdir(parents=True)
    return module


def found(house: ModuleType, capsys: pytest.CaptureFixture[str], source: str, name: str = "boxes.py") -> str:
    (house.PACKAGE / name).write_text(source)
    status = house.main()
    out = capsys.readouterr().out
    assert status == (0 if " 0 breaches" in out else 1)
    return out


def test_a_clean_module_passes(house: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    source = '"""A job."""\nimport os\nclass A:\n    def __init__(self): self._x = 1\ndef f(a): os._exit(a._x)\n'
    assert "1 modules, 0 breaches" in found(house, capsys, source)


@pytest.mark.parametrize(
    "line",
    [
        "from torch._utils import _rebuild_tensor_v2",
        "import torch._dynamo",
        "def f(t): return t._local_tensor",
        "def f(t): return getattr(t, '_spec', None)",
        "import torch\nx = torch._C",
    ],
)
def test_private_names_of_others_are_found(house: ModuleType, capsys: pytest.CaptureFixture[str], line: str) -> None:
    assert "boxes.py" in found(house, capsys, f'"""A job."""\n{line}\n')


def test_private_names_may_be_used_in_the_compatibility_module(
    house: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    source = '"""A job."""\nfrom torch._utils import _rebuild_tensor_v2\n'
    assert " 0 breaches" in found(house, capsys, source, "_torch_compat.py")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("x = 1\n", "no module docstring"),
        ('"""A job."""\n' + "x = 1\n" * 800, "801 lines"),
        ('"""A job."""\n\n\ndef f():\n' + "    x = 1\n" * 70, "`f` has 71 lines"),
        ('"""A job."""\n# TO' + "DO: later\n", "left in the source"),
        ('"""A job."""\nfrom holdfast.storage.local import LocalStorage\n', "ask for a `Storage`"),
        ('"""A job."""\nx = cast("LocalStorage", 1)\n', "casts to `LocalStorage`"),
    ],
)
def test_the_other_rules_are_held(
    house: ModuleType, capsys: pytest.CaptureFixture[str], source: str, said: str
) -> None:
    assert said in found(house, capsys, source)


def test_vague_names_are_refused(house: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert "says nothing" in found(house, capsys, '"""A job."""\n', "utils.py")


def test_an_empty_package_file_needs_no_docstring(house: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert " 0 breaches" in found(house, capsys, "", "__init__.py")


def test_modules_of_tests_have_names_of_their_own(house: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("unit", "crash"):
        (house.ROOT / "tests" / folder).mkdir(parents=True)
        (house.ROOT / "tests" / folder / "test_it.py").write_text("")
    assert "is also the name of tests/crash/test_it.py" in found(house, capsys, "")


def test_a_long_module_of_tests_is_found(house: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    (house.ROOT / "tests").mkdir()
    long = house.ROOT / "tests" / "test_it.py"
    long.write_text("x = 1\n" * 1000)
    assert " 0 breaches" in found(house, capsys, "")
    long.write_text("x = 1\n" * 1001)
    assert "tests/test_it.py:1: 1001 lines" in found(house, capsys, "")


def test_a_new_room_is_found(house: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert "new room" in found(house, capsys, '"""A job."""\n', "attic.py")
    (house.PACKAGE / "attic.py").unlink()
    assert " 0 breaches" in found(house, capsys, '"""A job."""\n', "boxes.py")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("class Same: pass\n", "too: name it anew"),
        (
            "try:\n    g()\nexcept OSError as error:\n    a(error)\n    b()\n    raise\n",
            "`except` block",
        ),
    ],
)
def test_what_stands_in_two_modules_is_found(
    house: ModuleType, capsys: pytest.CaptureFixture[str], source: str, said: str
) -> None:
    (house.PACKAGE / "boxes.py").write_text(f'"""A job."""\n{source}')
    assert said in found(house, capsys, f'"""A job."""\n{source}', "errors.py")


def test_a_small_module_with_one_importer_is_found(house: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    (house.PACKAGE / "errors.py").write_text('"""A job."""\nfrom holdfast import boxes\n')
    assert "imported by errors alone" in found(house, capsys, '"""A job."""\n', "boxes.py")
    (house.PACKAGE / "events.py").write_text('"""A job."""\nfrom holdfast.boxes import a\n')
    assert " 0 breaches" in found(house, capsys, '"""A job."""\n', "boxes.py")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("a.state = State.PUBLISH", "past its table"),
        ("def f():\n    'Of all that is left.'", "with a verb"),
    ],
)
def test_what_goes_past_a_seam_is_found(
    house: ModuleType, capsys: pytest.CaptureFixture[str], line: str, said: str
) -> None:
    assert said in found(house, capsys, f'"""A job."""\n{line}\n', "boxes.py")
