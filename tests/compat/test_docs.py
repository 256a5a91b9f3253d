"""The documentation is run: every Python block of a page, in order, in one process and one empty directory.

Also: no page links to what isn't there, and the configuration page lists every field with its true default.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator
from pathlib import Path

import page_blocks
import pytest
from page_blocks import BLOCK
from tests.crash.nursery import Nursery

import holdfast
from holdfast import errors

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
PAGES_WITH_BLOCKS = [page for page in PAGES if BLOCK.search(page.read_text())]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def headings(page: Path) -> set[str]:
    """The anchors of a page, as its viewer makes them from headings."""
    lines = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL).splitlines()
    titles = [line.lstrip("#").strip().lower() for line in lines if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


def test_there_are_blocks_to_run() -> None:
    assert {"README.md", "docs/getting-started.md", "docs/stock-dcp.md"} <= {
        name_of(page) for page in PAGES_WITH_BLOCKS
    }


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(page_blocks.__file__).parent), prepend=os.pathsep)
        with Nursery("torch", "holdfast", page_blocks.__name__) as found:
            yield found


@pytest.mark.parametrize("page", PAGES_WITH_BLOCKS, ids=name_of)
def test_blocks_run(page: Path, tmp_path: Path, nursery: Nursery) -> None:
    (place := tmp_path / "place").mkdir()
    child = nursery.start(
        page_blocks.__name__, "run", {"page": str(page), "directory": str(place)}, log=tmp_path / "log"
    )
    assert child.wait(600) == 0, f"{name_of(page)}:\n{child.stdout()}\n{child.stderr()}"
    hidden = list(tmp_path.rglob(".*.incomplete"))
    assert not hidden, f"{name_of(page)} leaves attempts behind: {hidden}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{name_of(page)} links to {link}"
        if anchor:
            assert anchor in headings(target), f"{name_of(page)} links to {link}: no such heading"


def table_rows(section: str) -> dict[str, str]:
    """Field → default, as the tables of a section of the configuration page say."""
    return dict(re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", section, re.MULTILINE))


def test_configuration_page_lists_every_field_with_its_default() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    of_config, _, of_keep = text.partition("\n## Keep\n")
    for cls, section in ((holdfast.CheckpointConfig, of_config), (holdfast.Keep, of_keep)):
        documented = {
            name: eval(default, vars(holdfast) | {"Keep": holdfast.Keep})
            for name, default in table_rows(section).items()
        }
        assert documented == {field.name: getattr(cls(), field.name) for field in dataclasses.fields(cls)}


def test_errors_page_lists_every_error() -> None:
    text = (ROOT / "docs" / "errors.md").read_text()
    documented = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    raised = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert documented == raised - {"HoldfastError"}
