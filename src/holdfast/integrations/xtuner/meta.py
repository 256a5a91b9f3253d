"""XTuner's record of a work directory, ``.xtuner``: its runs, and the checkpoints and exports of each.

Guarantees: what `XTunerMeta.write` has written is durable on return, and replaces the old record as a whole. Members
that a newer XTuner has added are kept. The JSON is the one that XTuner's own models read (they refuse further members).
Does not: look at the checkpoints.
"""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from holdfast.errors import CheckpointCorrupt
from holdfast.storage.local import open_storage

META_NAME: Final = ".xtuner"


@dataclass
class ExpInfo:
    """One run: its directory, its history, and what it has saved, oldest first."""

    history: list[dict[str, Any]]
    exp_dir: str
    hf_checkpoint_list: list[str] = field(default_factory=list)
    checkpoint_list: list[str] = field(default_factory=list)
    snap_checkpoint_list: list[str] = field(default_factory=list)
    cur_step: int = 0
    cur_epoch: int = 0
    consumed_tokens: int = 0
    consumed_samples: int = 0
    others: dict[str, Any] = field(default_factory=dict)
    """Members that this module doesn't know."""

    @property
    def checkpoints(self) -> list[str]:
        """Return checkpoints and snapshots, the newest first; of a step that has both, the snapshot first."""
        return sorted([*self.snap_checkpoint_list, *self.checkpoint_list], key=step_of_path, reverse=True)

    @property
    def latest_checkpoint(self) -> str | None:
        """Return the newest checkpoint or snapshot."""
        return next(iter(self.checkpoints), None)


@dataclass
class XTunerMeta:
    """The record of a work directory."""

    exps: list[ExpInfo] = field(default_factory=list)

    @property
    def latest_exp(self) -> ExpInfo:
        """Return the run that was started last; `IndexError` if there is none."""
        return self.exps[-1]

    @property
    def latest_checkpoint(self) -> str | None:
        """Return the newest checkpoint of the newest run that has any."""
        return next((found for exp in reversed(self.exps) if (found := exp.latest_checkpoint)), None)

    @property
    def latest_hf_checkpoint(self) -> str | None:
        """Return the newest export of the newest run that has any."""
        return next((exp.hf_checkpoint_list[-1] for exp in reversed(self.exps) if exp.hf_checkpoint_list), None)

    def get_exp_by_checkpoint(self, checkpoint: str) -> ExpInfo | None:
        """Return the run that saved ``checkpoint``."""
        return next((exp for exp in self.exps if checkpoint in (*exp.checkpoint_list, *exp.snap_checkpoint_list)), None)

    @classmethod
    def read(cls, work_dir: str | os.PathLike[str]) -> XTunerMeta:
        """Read the record in ``work_dir``; an empty one if there is none. Raises `CheckpointCorrupt`."""
        path = Path(work_dir) / META_NAME
        try:
            return cls.decode(path.read_bytes())
        except FileNotFoundError:
            return cls()
        except (ValueError, TypeError, KeyError) as error:
            message = f"{path} is no record of XTuner's: {error}; restore it, or move it away to begin a new one"
            raise CheckpointCorrupt(message, path=str(path)) from error

    @classmethod
    def decode(cls, data: bytes) -> XTunerMeta:
        """Return the record whose JSON is ``data``; `ValueError`, `TypeError` or `KeyError` for what is none."""
        known = {item.name for item in fields(ExpInfo)} - {"others"}
        exps = []
        for exp in json.loads(data)["exps"]:
            others = {name: value for name, value in exp.items() if name not in known}
            exps.append(ExpInfo(**{name: value for name, value in exp.items() if name in known}, others=others))
        return cls(exps)

    def encode(self) -> bytes:
        """Return the JSON of the record."""
        exps = []
        for exp in self.exps:
            members = dict(vars(exp))
            others = members.pop("others")
            exps.append({**members, **others})
        return json.dumps({"exps": exps}, indent=2).encode()

    def write(self, work_dir: str | os.PathLike[str]) -> None:
        """Replace the record in ``work_dir``; durable on return. Raises `StorageError`."""
        write_file(Path(work_dir) / META_NAME, self.encode())


def write_file(path: Path, data: bytes) -> None:
    """Replace the file at ``path`` as a whole; durable on return. Raises `StorageError`."""
    open_storage(str(path.parent)).replace_file(path.name, data, by=f".{path.name}.{secrets.token_hex(6)}")


def step_of_path(path: str) -> int:
    """Return the step that the name of a checkpoint ends in, as XTuner finds it; -1 if it ends in none."""
    last = path.rsplit("-", 1)[-1]
    return int(last) if last.isdecimal() else -1
