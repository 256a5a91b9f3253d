"""All exports of a manager: which are due, from which capture they are made, and when they have ended.

An export that is due together with a checkpoint is made from the same capture; several that are due without one share
a capture of the tensors that they need.

Guarantees: an export that fails disturbs neither checkpoints nor other exports; its failure is told by its handle.
Assumes: every rank asks for the same steps in the same order, on its training thread.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from holdfast.capture import SaveRequest
from holdfast.errors import ConfigError, DeadlineExceeded
from holdfast.export.exchange import Exchange
from holdfast.export.hf_export import HFExport
from holdfast.export.recipe import Recipe, models_of
from holdfast.export.session import Exporter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from holdfast.config import CheckpointConfig
    from holdfast.export.session import Ticket
    from holdfast.group import Group
    from holdfast.saver import Saver
    from holdfast.state.tree import StateTree


class Exports:
    """The exporters of one manager, on one rank."""

    def __init__(
        self,
        exports: Sequence[HFExport] | HFExport,
        state: Mapping[str, Any],
        root: str,
        group: Group,
        config: CheckpointConfig,
        saver: Saver,
    ) -> None:
        """Raises what is wrong with any of them, with none begun; `start` once all ranks are ready."""
        exports = [exports] if isinstance(exports, HFExport) else list(exports)
        checked(exports, root)
        recipes = [Recipe(export, models_of(export, state), rank=group.rank) for export in exports]
        self._config = config
        self._saver = saver
        self._exporters: list[Exporter] = []
        try:
            for number, (export, recipe) in enumerate(zip(exports, recipes, strict=True)):
                self._exporters.append(
                    Exporter(
                        export,
                        recipe,
                        group,
                        config,
                        number=number,
                        exchange=exchange_of(group, f"export/{number}"),
                        callbacks=saver.callbacks,
                        wait_staged=saver.wait_staged,
                    )
                )
        except BaseException:
            self.give_up_start()
            raise

    def start(self) -> None:
        for exporter in self._exporters:
            exporter.start()

    def give_up_start(self) -> None:
        for exporter in self._exporters:
            exporter.give_up_start()

    def resumed_from(self, step: int | None) -> None:
        for exporter in self._exporters:
            exporter.resumed_from(step)

    def due(self, step: int) -> list[Exporter]:
        return [exporter for exporter in self._exporters if exporter.is_due(step)]

    def capture(self, tree: StateTree, step: int, due: Sequence[Exporter], takers: tuple[Ticket, ...]) -> None:
        """Capture what ``due`` need, for nobody but ``takers``, which are theirs."""
        request = SaveRequest(
            step=step,
            name=f"exports of step {step}",
            metrics={},
            resumable=False,
            overwrite=False,
            eager=self._config.staging == "eager",
            checkpoint=False,
        )
        self._saver.start(tree, request, takers=takers, only=wanted_by(due))

    def wait(self, timeout_s: float | None) -> None:
        """Return when none is in work; outcomes are in the handles. Raises `DeadlineExceeded`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for exporter in self._exporters:
            exporter.wait(deadline)

    def close(self, timeout_s: float | None) -> None:
        """Let what is in work end, then release everything; idempotent. Raises `DeadlineExceeded` after it."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        late: DeadlineExceeded | None = None
        for exporter in self._exporters:
            try:
                exporter.close(deadline)
            except DeadlineExceeded as error:
                late = late or error
        if late is not None:
            raise late


def wanted_by(due: Sequence[Exporter]) -> Callable[[str], bool]:
    """Which tensors ``due`` need, by name."""
    return lambda name: any(exporter.recipe.wants(name) for exporter in due)


def exchange_of(group: Group, name: str) -> Exchange | None:
    """Links between the ranks of ``group``, made when first needed; None where there is one rank."""
    if group.world == 1 or group.store is None:
        return None
    return Exchange.over_gloo(group.board.clone(), group.store, f"{group.prefix}/{name}")


def checked(exports: Sequence[HFExport], root: str) -> None:
    """Raise `ConfigError` unless ``exports`` are exports to roots of their own."""
    seen: dict[str, str] = {os.path.realpath(root): "the manager's own root"}
    for export in exports:
        if not isinstance(export, HFExport):
            raise ConfigError(f"exports: expected holdfast.HFExport, found {export!r:.200}", field="exports")
        place = os.path.realpath(export.root)
        if place in seen:
            raise ConfigError(
                f"exports: {os.fspath(export.root)} is {seen[place]}; give each export a root of its own",
                field="exports",
            )
        seen[place] = "the root of another export"
