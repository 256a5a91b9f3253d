"""A session is opened in order, closed in reverse, and fails alike on every rank."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast
from holdfast.coordination import group as groups
from holdfast.coordination.board import LocalBoard
from holdfast.engine.client import EngineClient
from holdfast.errors import ConfigError, StorageError
from holdfast.saver import session as sessions
from holdfast.saver.session import Session
from holdfast.storage.local import LocalStorage
from holdfast.sync import DirectoryTransport, Publisher

SOON_S = 30.0


@pytest.fixture
def done() -> list[str]:
    return []


def opened(done: list[str], *, failing: str = "", error: type[BaseException] = OSError) -> Session:
    """Return a session that holds three things; releasing ``failing`` fails once."""
    left = [failing]

    def release(name: str) -> None:
        done.append(name)
        if left[0] == name:
            left[0] = ""
            raise error(name)

    session = Session(None, purpose="save")
    for name in ("place", "lock", "lease"):
        session.hold(lambda name=name: release(name))
    return session


def test_held_resources_are_released_once_in_reverse_order(done: list[str]) -> None:
    session = opened(done)
    session.close(SOON_S)
    session.close(SOON_S)
    assert done == ["lease", "lock", "place"]
    assert isinstance(session.group.board, LocalBoard)
    assert session.group.board._closed


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("failing", ["lease", "lock", "place"])
def test_close_runs_all_steps_after_a_failure_or_interrupt(
    done: list[str], failing: str, error: type[BaseException]
) -> None:
    session = opened(done, failing=failing, error=error)
    with pytest.raises(error, match=failing):
        session.close(SOON_S)
    assert done == ["lease", "lock", "place"]
    assert session.group.board._closed  # type: ignore[attr-defined]


def test_nothing_is_released_while_a_thread_may_still_publish(
    done: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = opened(done)
    saver = session.start_saver(LocalStorage(str(tmp_path)), holdfast.CheckpointConfig())
    with monkeypatch.context() as patched:
        patched.setattr(type(saver), "has_ended", property(lambda _: False))
        session.close(SOON_S)
        assert done == []
    session.close(SOON_S)
    assert done == ["lease", "lock", "place"]


def test_what_runs_on_the_saver_is_closed_first_and_both_even_if_it_fails(done: list[str], tmp_path: Path) -> None:
    session = opened(done)
    saver = session.start_saver(LocalStorage(str(tmp_path)), holdfast.CheckpointConfig())

    def first() -> None:
        done.append("exports" if not saver.has_ended else "too late")
        raise OSError("exports")

    with pytest.raises(OSError, match="exports"):
        session.close(SOON_S, first=first)
    assert saver.has_ended
    assert done == ["exports", "lease", "lock", "place"]


def test_a_failing_block_is_voted_on_but_an_interrupt_is_not(done: list[str]) -> None:
    with opened(done) as session:
        with pytest.raises(ConfigError, match="not that"), session.settling():
            raise ConfigError("not that", field="w")
        with pytest.raises(KeyboardInterrupt), session.settling():
            raise KeyboardInterrupt
        with session.settling():
            pass
    assert done == ["lease", "lock", "place"]


def test_all_ranks_raise_the_same_if_one_cannot_open(monkeypatch: pytest.MonkeyPatch, done: list[str]) -> None:
    from _protocol import run_ranks

    boards = LocalBoard.of_world(3)

    def open_group(rank: int, **_: object) -> groups.Group:
        return groups.Group(rank, 3, (0, 1, 2), boards[rank])

    monkeypatch.setattr(sessions, "open_group", open_group)

    def act(rank: int) -> None:
        with Session(rank, purpose="save") as session, session.settling(timeout_s=SOON_S):
            if rank == 1:
                raise StorageError("no space", path="/there", errno=28)

    found = run_ranks(act, 3)
    assert [type(error) for error in found] == [StorageError] * 3
    assert [str(error) for error in found] == ["on rank 1: no space", "no space", "on rank 1: no space"]
    monkeypatch.undo()
    assert boards[0]._memory.values == {}
    assert boards[0]._memory.lists == {}


def test_a_publisher_interrupted_while_opening_releases_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(EngineClient, "start", interrupt)
        with pytest.raises(KeyboardInterrupt):
            Publisher(DirectoryTransport(tmp_path))
    Publisher(DirectoryTransport(tmp_path)).close()
