"""The documentation is run: every Python block of a page, in order, in one process and one empty directory.

Also: no page links to what isn't there, and the configuration page lists every field with its true default.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
from holdfast import errors

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
PAGES_WITH_BLOCKS = [page for page in PAGES if BLOCK.search(page.read_text())]

# Runs a page's blocks under its own name, each on its own lines: a traceback then points into the page.
RUNNER = """
import re, sys
page = sys.argv[1]
sys.path.insert(0, sys.argv[2])
text = open(page).read()
names = {"__name__": "__main__"}
for block in re.finditer(r"^```python\\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
    above = text.count("\\n", 0, block.start(1))
    exec(compile("\\n" * above + block.group(1), page, "exec"), names)
"""


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


@pytest.mark.parametrize("page", PAGES_WITH_BLOCKS, ids=name_of)
def test_blocks_run(page: Path, tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", RUNNER, str(page), str(Path(holdfast.__file__).parents[1])],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 0, f"{name_of(page)}:\n{ended.stdout}\n{ended.stderr}"
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
