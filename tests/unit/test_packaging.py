"""What the package says of itself in pyproject.toml, held against its source; the build itself is tests/packaging."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import holdfast

if sys.version_info >= (3, 11):
    import tomllib
else:  # pip brings it along
    from pip._vendor import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "holdfast"
DOCUMENT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT: dict[str, Any] = DOCUMENT["project"]
DISTRIBUTIONS = {  # import names that aren't those of their distributions
    "google": "protobuf",
    "multistorageclient": "multi-storage-client",
    "opentelemetry": "opentelemetry-api",
    "prometheus_client": "prometheus-client",
    "typing_extensions": "typing-extensions",
}


def name_of(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found is not None
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def imports_of(path: Path) -> set[str]:
    """Top-level modules that are imported unconditionally when a module of the package is."""
    tree = ast.parse(path.read_text())
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.partition(".")[0])
    return found


def test_metadata_are_complete() -> None:
    for field in ("description", "readme", "requires-python", "license", "license-files", "authors", "keywords"):
        assert PROJECT[field], field
    assert PROJECT["license"] == "Apache-2.0"
    assert all((ROOT / name).is_file() for name in [PROJECT["readme"], *PROJECT["license-files"]])
    assert not any(one.startswith("License ::") for one in PROJECT["classifiers"]), "the expression says it"
    assert {"Typing :: Typed", "Operating System :: POSIX :: Linux"} <= set(PROJECT["classifiers"])
    least = re.fullmatch(r">=3\.(\d+)", PROJECT["requires-python"])
    assert least is not None
    named = {int(one.rpartition(".")[2]) for one in PROJECT["classifiers"] if "Python :: 3." in one}
    assert min(named) == int(least[1])
    assert named == {*range(min(named), max(named) + 1)}
    assert (PACKAGE / "py.typed").is_file()
    assert f"## {holdfast.__version__} " in (ROOT / "CHANGELOG.md").read_text()


def test_what_every_module_imports_at_once_is_a_dependency() -> None:
    required = {name_of(one) for one in PROJECT["dependencies"]}
    own = {*sys.stdlib_module_names, "holdfast"}
    for path in PACKAGE.rglob("*.py"):
        relative = path.relative_to(PACKAGE)
        if relative.parts[0] == "integrations" or relative.parts[:2] == ("sync", "adapters"):
            continue  # whoever imports these has the framework
        for name in imports_of(path) - own:
            assert name_of(DISTRIBUTIONS.get(name, name)) in required, f"{relative} imports {name}"


def test_extras_that_errors_and_docs_name_exist() -> None:
    extras = PROJECT["optional-dependencies"].keys()
    named: dict[str, str] = {}
    for path in [*PACKAGE.rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]:
        for found in re.finditer(r"holdfast\[([a-z, ]+)\]", path.read_text()):
            named |= {one.strip(): str(path) for one in found[1].split(",")}
    assert named, "the search finds what there is"
    assert not {one: where for one, where in named.items() if one not in extras}


@pytest.mark.parametrize("extra", sorted(PROJECT["optional-dependencies"]))
def test_an_extra_adds_something(extra: str) -> None:
    required = {name_of(one) for one in PROJECT["dependencies"]}
    added = [name_of(one) for one in PROJECT["optional-dependencies"][extra]]
    assert added
    assert not required & set(added)
    assert len(added) == len(set(added))
