"""Every public name has a docstring that says what the house asks for, and a row in a reference page of the docs.

Public are the names in ``__all__`` of `holdfast`, `holdfast.dcp`, `holdfast.export` and `holdfast.sync`, those of each
module of `holdfast.integrations`, and those of the adapters that inference engines load. Frameworks needn't be
installed: their modules are read, not imported.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import pytest

import holdfast

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(holdfast.__file__).parent
REFERENCE = sorted((ROOT / "docs" / "reference").glob("*.md"))
OWN = ("holdfast", "holdfast.dcp", "holdfast.export", "holdfast.sync")
ROW = re.compile(r"^\| `(holdfast\.[\w.]+)` \|", re.MULTILINE)
# What users are given and don't make themselves: how it is made is nobody's business.
GIVEN = (holdfast.Checkpoint, holdfast.SaveHandle, holdfast.sync.Published, holdfast.sync.ReceiveStats, Exception)
# What Holdfast itself calls, or stock DCP: their signatures are those of `Transport` and of torch's storage classes.
CALLED_BY_OTHERS = {
    *("publishing", "receiving", "make_channels", "applied_to", "advance", "finish", "add_stats"),
    *(
        name
        for stock in (holdfast.dcp.Reader, holdfast.dcp.Writer)
        for base in stock.__mro__[1:]
        for name in vars(base)
    ),
}


def own_names() -> Iterator[tuple[str, Any]]:
    """Public names of Holdfast itself, with what they stand for."""
    for module in map(importlib.import_module, OWN):
        for name in module.__all__:
            value = getattr(module, name)
            if not isinstance(value, (ModuleType, str)):
                yield f"{module.__name__}.{name}", value


def adapters() -> Iterator[tuple[str, Path]]:
    for path in (PACKAGE / "integrations").iterdir():
        source = path / "__init__.py" if path.is_dir() else path
        if source.is_file() and path.stem != "__init__":
            yield f"holdfast.integrations.{path.stem}", source
    for engine in ("sglang", "verl", "vllm"):
        yield f"holdfast.sync.adapters.{engine}", PACKAGE / "sync" / "adapters" / f"{engine}.py"


def adapters_names() -> Iterator[tuple[str, Path, str]]:
    """Public names of adapters, with the file where each is looked up: ``__all__``, or what is defined there."""
    for module, source in adapters():
        tree = ast.parse(source.read_text(encoding="utf-8"))
        listed = [node.value for node in tree.body if isinstance(node, ast.Assign) and is_all(node)]
        names = ast.literal_eval(listed[0]) if listed else [node.name for node in tree.body if is_public(node)]
        yield from ((f"{module}.{name}", source, name) for name in names)


def is_all(node: ast.Assign) -> bool:
    return any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets)


def is_public(node: ast.AST) -> bool:
    return isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")


def definition(source: Path, name: str) -> ast.FunctionDef | ast.ClassDef:
    """What ``name`` means in ``source``, there or where it is imported from."""
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == name for alias in node.names):
            below = PACKAGE.joinpath(*(node.module or "").split(".")[1:])
            return definition(below / "__init__.py" if below.is_dir() else below.with_suffix(".py"), name)
    raise AssertionError(f"{source} has no {name}")


def opening_is_a_sentence(docstring: str) -> bool:
    opening = docstring.strip().split("\n\n")[0]
    return bool(re.match(r"[A-Z`]|\w+'s ", opening)) and opening.rstrip().endswith((".", ":"))


def undocumented(callable_: FunctionType, docstring: str, owner: Any = holdfast) -> list[str]:
    """Arguments that ``docstring``, and those of the functions that it refers to for arguments, don't say a word of."""
    for other in re.findall(r"rguments (?:are those of|as for|of) `(\w+)`", docstring):
        docstring += inspect.getdoc(getattr(owner, other)) or ""
    arguments = [
        name for name in inspect.signature(callable_).parameters if name != "self" and not name.startswith("_")
    ]
    return [name for name in arguments if not re.search(rf"\b{name}\b", docstring)]


def methods(cls: type) -> Iterator[tuple[str, Any]]:
    for name, member in vars(cls).items():
        if not name.startswith("_") and isinstance(member, (FunctionType, property, classmethod, staticmethod)):
            yield name, member


OWN_NAMES = dict(own_names())
ADAPTERS_NAMES = {name: (source, short) for name, source, short in adapters_names()}


def test_all_adapters_are_seen() -> None:
    seen = {name.split(".")[2] for name in ADAPTERS_NAMES}
    assert {"accelerate", "lightning", "torchtitan", "adapters", "prometheus"} <= seen
    assert len(OWN_NAMES) > 60


@pytest.mark.parametrize("name", OWN_NAMES)
def test_docstring_says_what_it_does_and_all_arguments(name: str) -> None:
    value = OWN_NAMES[name]
    docstring = inspect.getdoc(value)
    assert docstring, f"{name} has no docstring"
    assert opening_is_a_sentence(docstring), f"the first paragraph of {name}'s docstring is no sentence"
    if isinstance(value, FunctionType):
        assert not undocumented(value, docstring), f"{name} doesn't say what these arguments are"
        return
    if not issubclass(value, GIVEN) and isinstance(init := vars(value).get("__init__"), FunctionType):
        assert not undocumented(init, docstring + (init.__doc__ or "")), f"{name} doesn't say what these arguments are"


@pytest.mark.parametrize("name", [name for name, value in OWN_NAMES.items() if isinstance(value, type)])
def test_every_method_has_a_docstring_that_says_all_arguments(name: str) -> None:
    for short, member in methods(OWN_NAMES[name]):
        docstring = inspect.getdoc(getattr(OWN_NAMES[name], short))
        assert docstring or short in CALLED_BY_OTHERS, f"{name}.{short} has no docstring"
        if isinstance(member, FunctionType) and short not in CALLED_BY_OTHERS:
            assert not undocumented(member, docstring or "", OWN_NAMES[name]), (
                f"{name}.{short} doesn't say what these arguments are"
            )


@pytest.mark.parametrize("name", ADAPTERS_NAMES)
def test_docstring_of_an_adapter_says_what_it_does(name: str) -> None:
    node = definition(*ADAPTERS_NAMES[name])
    docstring = ast.get_docstring(node)
    assert docstring, f"{name} has no docstring"
    assert opening_is_a_sentence(docstring), f"the first paragraph of {name}'s docstring is no sentence"
    if isinstance(node, ast.FunctionDef):
        return
    silent = [one.name for one in node.body if is_public(one) and not ast.get_docstring(one)]
    assert not silent, f"methods of {name} without a docstring"


def test_every_public_name_has_a_row_in_a_reference_page() -> None:
    rows = [row for page in REFERENCE for row in ROW.findall(page.read_text(encoding="utf-8"))]
    assert len(rows) == len(set(rows)), "a name is in two rows"
    missing = sorted({*OWN_NAMES, *ADAPTERS_NAMES} - set(rows))
    assert not missing, "add a row for these to a page of docs/reference"


def test_no_reference_page_names_what_is_not_there() -> None:
    for page in REFERENCE:
        for name in set(ROW.findall(page.read_text(encoding="utf-8"))) - set(ADAPTERS_NAMES):
            module, _, short = name.rpartition(".")
            assert hasattr(importlib.import_module(module), short), f"{page.name} has {name}, the package doesn't"


def test_every_page_is_in_the_navigation() -> None:
    """As `make docs` demands; a name that ends in a slash stands for all pages of a folder."""
    pages = set(re.findall(r"[:-] (\S+(?:\.md|/))$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    for page in (ROOT / "docs").rglob("*.md"):
        name = str(page.relative_to(ROOT / "docs"))
        assert name in pages or f"{page.parent.name}/" in pages, f"mkdocs.yml doesn't have {name}"


def test_the_map_of_the_house_names_every_module():
    """Of rooms that hold one module for each of many things alike, the map names these things."""
    section = (ROOT / "docs" / "design.md").read_text().partition("## 7.")[2].partition("\n## ")[0]
    named = set(re.findall(r"\w+", section))
    alike = {PACKAGE / room for room in ("cli", "integrations", "sync/adapters", "sync/session", "testing")}
    modules = {path for path in PACKAGE.rglob("*.py") if not alike & set(path.parents)}
    lacking = {str(path.relative_to(PACKAGE)) for path in modules if path.stem not in named}
    assert lacking - {"__main__.py", "_version.py", "engine/__main__.py"} == set()
