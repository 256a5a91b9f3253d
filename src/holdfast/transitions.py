"""The states of an attempt and who may take it from one to the next: the table, and nothing else. Torch-free.

    BEGIN --> PERSISTING --> REPORTED --> COMMIT --> PUBLISHED
      |            |             |           |
      +------------+-------------+-----------+--> ABORT --> REMOVED

COMMIT goes on to ABORT only if the storage refuses the final rename: until the coordinator has announced the end,
nobody takes COMMIT for success, so nobody is misled.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final


class State(enum.Enum):
    BEGIN = "begin"
    PERSISTING = "persisting"
    REPORTED = "reported"
    COMMIT = "commit"
    PUBLISHED = "published"
    ABORT = "abort"
    REMOVED = "removed"


class Actor(enum.Enum):
    """Who takes an edge. A follower that takes an edge of the coordinator's only learns that it was taken."""

    COORDINATOR = "coordinator"
    FOLLOWER = "follower"
    RECOVERY = "recovery"


_RANKS = frozenset({Actor.COORDINATOR, Actor.FOLLOWER})
_EVERYONE = _RANKS | {Actor.RECOVERY}


@dataclass(frozen=True, slots=True)
class Edge:
    source: State
    target: State
    actors: frozenset[Actor]
    deadline: str
    """The field of `Deadlines` it is taken within, counted from the end of the one before."""


TRANSITIONS: Final = (
    Edge(State.BEGIN, State.PERSISTING, _EVERYONE, "begin_s"),
    Edge(State.BEGIN, State.ABORT, _RANKS, "begin_s"),
    Edge(State.PERSISTING, State.REPORTED, _EVERYONE, "persist_s"),
    Edge(State.PERSISTING, State.ABORT, _EVERYONE, "persist_s"),
    Edge(State.REPORTED, State.COMMIT, _EVERYONE, "commit_s"),
    Edge(State.REPORTED, State.ABORT, _EVERYONE, "commit_s"),
    Edge(State.COMMIT, State.PUBLISHED, _EVERYONE, "commit_s"),
    Edge(State.COMMIT, State.ABORT, frozenset({Actor.COORDINATOR, Actor.RECOVERY}), "commit_s"),
    Edge(State.ABORT, State.REMOVED, _EVERYONE, "commit_s"),
)
_EDGES: Final = {(edge.source, edge.target): edge for edge in TRANSITIONS}


class IllegalTransition(AssertionError):
    """The protocol was not followed: a defect of Holdfast, or of its caller."""


def advance(source: State, target: State, actor: Actor) -> State:
    """``target``, if the table has that edge and ``actor`` may take it; `IllegalTransition` if not."""
    edge = _EDGES.get((source, target))
    if edge is None or actor not in edge.actors:
        raise IllegalTransition(f"{actor.value} can't go from {source.name} to {target.name}")
    return target
