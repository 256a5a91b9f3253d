"""What a notebook shows of a checkpoint, a save and a manager."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.loader.notebook import bars_html, facts_html


class Text(HTMLParser):
    """Text between tags, and the tags, which have to be closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.text = ""
        self.feed(html)
        self.close()
        assert not self.open, f"{self.open} stay open"

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += f" {data}"


def test_a_checkpoint_shows_what_it_holds(tmp_path: Path) -> None:
    state = {"model": nn.Linear(64, 64), "<b>odd & bold": torch.ones(3)}
    checkpoint = holdfast.save(state, tmp_path / "one", step=7, metrics={"loss": 0.25})
    shown = Text(checkpoint._repr_html_())
    for word in ("7", "loss 0.25", "16.2 KiB", "3 tensors", "by 1 rank", "<b>odd & bold", str(tmp_path)):
        assert word in shown.text, word
    assert "b" not in shown.tags
    assert shown.tags <= {"div", "span", "table", "tr", "td", "th"}


def test_a_damaged_checkpoint_says_so(tmp_path: Path) -> None:
    holdfast.save({"model": nn.Linear(2, 2)}, tmp_path / "one")
    checkpoint = holdfast.open(tmp_path / "one")
    report = tmp_path / "one" / "rank-00000.report"
    report.write_bytes(bytes(report.stat().st_size))
    assert "damaged" in Text(checkpoint._repr_html_()).text


def test_a_save_shows_how_far_it_is_and_why_it_failed(tmp_path: Path) -> None:
    with holdfast.CheckpointManager(tmp_path / "root", {"model": nn.Linear(2, 2)}) as manager:
        handle = manager.save(3)
        handle.result()
        shown = Text(handle._repr_html_()).text
        for word in ("Save", "3", "published", "persist"):
            assert word in shown, word
        assert "step 3" not in Text(manager._repr_html_()).text, "nothing is in flight"
        assert "published, latest" in Text(manager._repr_html_()).text
        assert repr(manager) == f"<CheckpointManager root={str(tmp_path / 'root')!r} rank=0 of 1, 0 saves in flight>"
        (tmp_path / "root" / "step-4").write_text("in the way")
        failed = manager.save(4)
        with pytest.raises(holdfast.CheckpointExists):
            failed.result(30)
        assert "CheckpointExists" in Text(failed._repr_html_()).text
    assert "closed" in repr(manager)


def test_many_steps_and_many_names_are_cut(tmp_path: Path) -> None:
    config = holdfast.CheckpointConfig(every=1, keep=None)
    with holdfast.CheckpointManager(tmp_path, {"x": 1}, config=config) as manager:
        for step in range(1, 15):
            manager.save(step).result()
        shown = Text(manager._repr_html_()).text
    assert "and 2 older ones" in shown
    assert "step-14" in shown
    assert "step-2 " not in f"{shown} "
    assert "5 more" in Text(bars_html({str(number): number for number in range(12)})).text
    assert Text(bars_html({})).text == ""


def test_facts_are_escaped_and_empty_ones_left_out() -> None:
    shown = Text(facts_html("<i>", {"a": "<script>alert(1)</script>", "none": ""}))
    assert shown.tags == {"div", "table", "tr", "td"}
    assert "none" not in shown.text
