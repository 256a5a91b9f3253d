"""``import holdfast`` is cheap, and what the engine runs on needs no torch: seen in processes of their own.

The import contracts in pyproject.toml say the same of the source; these say it of what runs.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import holdfast

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "numpy", "safetensors", "transformers")


def run(code: str) -> str:
    """What ``code`` prints in a fresh interpreter that finds the package where this one did."""
    package = str(Path(holdfast.__file__).parents[1])
    prelude = f"import sys; sys.path.insert(0, {package!r})\n"
    ended = subprocess.run(
        [sys.executable, "-c", prelude + code], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def torch_free_modules() -> list[str]:
    text = (ROOT / "pyproject.toml").read_text()
    match = re.search(r"^source_modules = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert match is not None
    return re.findall(r'"([\w.]+)"', match.group(1))


def test_importing_the_package_imports_nothing_heavy_and_starts_nothing() -> None:
    assert (
        run(
            "import holdfast, os, threading\n"
            f"print([name for name in {HEAVY!r} if name in sys.modules], threading.active_count(),"
            " len(os.listdir('/proc/self/task')))"
        )
        == "[] 1 1"
    )


def test_after_torch_what_saves_is_imported_with_the_package() -> None:
    assert run("import torch, holdfast\nprint('holdfast.api' in sys.modules)") == "True"
    assert run("import holdfast, torch\nprint('holdfast.api' in sys.modules)") == "False"


def test_saving_and_loading_plain_tensors_imports_no_dtensor(tmp_path: Path) -> None:
    """``torch.distributed.checkpoint`` brings in DTensor and sympy: the better part of a second of the first save."""
    assert (
        run(
            "import holdfast, torch\n"
            f"state = {{'w': torch.ones(4), 'epoch': 3}}\nholdfast.save(state, {str(tmp_path / 'c')!r})\n"
            f"holdfast.load(state, {str(tmp_path / 'c')!r})\n"
            "heavy = ('torch.distributed.checkpoint', 'torch.distributed.tensor', 'sympy', 'transformers')\n"
            "print([name for name in heavy if name in sys.modules])"
        )
        == "[]"
    )


def test_every_public_name_is_there() -> None:
    for name in holdfast.__all__:
        assert getattr(holdfast, name) is not None
    assert set(holdfast.__all__) <= set(dir(holdfast))


def test_torch_free_modules_can_be_imported_where_there_is_no_torch() -> None:
    modules = torch_free_modules()
    assert {"holdfast.engine", "holdfast.commit", "holdfast.storage"} <= set(modules)
    printed = run(
        f"sys.modules.update(dict.fromkeys({HEAVY!r}))\n"  # None makes an import of it fail
        "import importlib, pkgutil\n"
        "count = 0\n"
        f"for name in {modules!r}:\n"
        "    module = importlib.import_module(name)\n"
        "    below = getattr(module, '__path__', None)\n"
        "    found = [] if below is None else [item.name for item in pkgutil.walk_packages(below, name + '.')]\n"
        "    for inner in found:\n"
        "        if not inner.endswith('__main__'):\n"
        "            importlib.import_module(inner)\n"
        "    count += 1 + len(found)\n"
        "print(count)"
    )
    assert int(printed) > len(modules)
