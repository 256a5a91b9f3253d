"""Make the documentation's site of pages that are plain Markdown: mkdocs and griffe call what is here.

Guarantees: a page is shown as it is read on GitHub, but for four things. A reference page is a table of names, and on
the site each name's docstring follows. A link to a file outside docs/ leads to a page made of that file. A folder in
the navigation stands for its pages. The page of decisions lists them all.
Assumes: docstrings say what arguments mean in the house style, ``name: meaning``, see CONTRIBUTING.md.
Does not: import the package; griffe reads its source.
"""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import dirname, relpath
from typing import TYPE_CHECKING, Any

import griffe
from mkdocs.structure.files import File, InclusionLevel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
OUTSIDE = "repository/"
AS_THEY_ARE = {".json", ".md", ".png", ".svg"}  # other files become pages that show their text
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
RAISED = re.compile(r"(?:^|(?<=[.;] )|(?<=\n))\s*([A-Z]\w+):\s")
NAME_IN_TABLE = re.compile(r"^\| `(holdfast\.[\w.]+)` \|", re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages of a folder where the navigation names the folder."""
    config.nav = _unfolded(config.nav)
    return config


def _unfolded(entry: Any) -> Any:
    if isinstance(entry, list):
        return [_unfolded(one) for one in entry]
    if isinstance(entry, dict):
        return {title: _unfolded(one) for title, one in entry.items()}
    if entry.endswith("/"):
        pages = sorted((DOCS / entry).glob("*.md"), key=lambda page: (page.name != "README.md", page.name))
        return [str(page.relative_to(DOCS)) for page in pages]
    return entry


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for every file outside docs/ that a page links to, and for those that these link to."""
    waiting = [DOCS / file.src_uri for file in files.documentation_pages()]
    while waiting:
        page = waiting.pop()
        for target in _targets(page):
            uri = _uri(target)
            if target.is_relative_to(DOCS) or files.get_file_from_path(uri) or not target.is_file():
                continue
            given = {"abs_src_path": str(target)} if target.suffix in AS_THEY_ARE else {"content": _shown(target)}
            files.append(File.generated(config, uri, inclusion=InclusionLevel.NOT_IN_NAV, **given))
            if target.suffix == ".md":
                waiting.append(target)
    return files


def _targets(page: Path) -> Iterator[Path]:
    for link in LINK.finditer(page.read_text(encoding="utf-8")):
        target = (page.parent / link.group(1)).resolve()
        if target.is_relative_to(ROOT) and target.exists():
            yield target / "README.md" if target.is_dir() else target


def _uri(target: Path) -> str:
    """Where the site has what lies at ``target``."""
    if target.is_relative_to(DOCS):
        return str(target.relative_to(DOCS))
    return OUTSIDE + str(target.relative_to(ROOT)) + ("" if target.suffix in AS_THEY_ARE else ".md")


def _shown(file: Path) -> str:
    language = {".py": "python", ".sh": "bash"}.get(file.suffix, "text")
    text = file.read_text(encoding="utf-8")
    return f"---\nsearch:\n  exclude: true\n---\n# {file.relative_to(ROOT)}\n\n````{language}\n{text}\n````\n"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to files outside docs/ to their pages; add docstrings to the reference, and a list of decisions."""
    del config
    uri = page.file.src_uri
    source = ROOT / uri.removeprefix(OUTSIDE) if uri.startswith(OUTSIDE) else DOCS / uri

    def led(link: re.Match[str]) -> str:
        target = (source.parent / link.group(1)).resolve()
        if target.is_dir():
            target /= "README.md"
        known = files.get_file_from_path(_uri(target)) if target.is_relative_to(ROOT) else None
        return relpath(known.src_uri, dirname(uri) or ".") + (link.group(2) or "") if known else link.group()

    markdown = LINK.sub(led, markdown)
    if uri.startswith("reference/"):
        names = NAME_IN_TABLE.findall(markdown)
        markdown = NAME_IN_TABLE.sub(r"| [`\1`][\1] |", markdown) + "\n" + "".join(f"\n::: {name}\n" for name in names)
    if uri == "adr/README.md":
        for record in sorted(source.parent.glob("0*.md")):
            title = record.read_text(encoding="utf-8").partition("\n")[0]
            markdown += f"\n- [{title.removeprefix('# ')}]({record.name})"
    if page.parent is None:  # it is alone in its part of the site
        page.meta["hide"] = ["navigation"]
    return markdown


class HouseDocstrings(griffe.Extension):
    """Turn what docstrings say of arguments and fields, ``name: meaning``, into lists."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of a function or a class."""
        if obj.docstring is None or not (obj.is_function or obj.is_class):
            return
        names = {parameter.name for parameter in getattr(obj, "parameters", ())}
        if obj.is_class:
            names |= {name for name, member in obj.members.items() if member.is_attribute}
            init = obj.members.get("__init__")
            names |= (
                {parameter.name for parameter in init.parameters} if init is not None and init.is_function else set()
            )
        obj.docstring.value = markdown_of(obj.docstring.value, names - {"self"})


def markdown_of(docstring: str, names: set[str]) -> str:
    """Return ``docstring`` with its arguments as a list; headings of groups in bold; code blocks untouched."""
    one = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    label = re.compile(rf"(?:^|(?<=[.;:)`] )|(?<=\n))\s*((?:{one})(?:, (?:{one}))*):\s")
    paragraphs = []
    for paragraph in re.split(r"\n\s*\n", docstring):
        section, _, rest = paragraph.partition(":\n")
        if section == "Raises":
            paragraphs += ["**Raises**", _listed(rest, RAISED)]
        else:
            paragraphs.append(_listed(rest if section == "Args" else paragraph, label) if names else paragraph)
    return "\n\n".join(paragraphs)


def _listed(paragraph: str, label: re.Pattern[str]) -> str:
    if not label.search(paragraph) or "\n>>> " in paragraph:
        return paragraph
    # A short line before indented ones is the heading of a group.
    paragraph = re.sub(r"^(\w[\w ]{0,30})\n(?=    )", r"\n\n**\1**\n\n", paragraph, flags=re.MULTILINE)
    parts = []
    for part in re.split(r"\n\n+", paragraph):
        pieces = label.split(part)
        items = [
            f"- `{name.replace(', ', '`, `')}`: {' '.join(meaning.split())}"
            for name, meaning in zip(pieces[1::2], pieces[2::2], strict=True)
        ]
        parts += [piece for piece in (pieces[0].strip(), "\n".join(items)) if piece]
    return "\n\n".join(parts)
