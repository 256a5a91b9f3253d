"""Choose by name which tensors are published, or received: `NameChoice`.

A word of ``include`` or ``exclude`` is a dotted prefix, as for `holdfast.load` (``"model.layers.0"`` is that name and
all below it), or a pattern, if it has a ``*``, ``?`` or ``[``: then it has to match the whole name, as in a shell
(``"*.lora_*"``); a ``*`` matches dots, too.

Guarantees: a word that matches nothing is a `ConfigError` that names it, so that nothing is lost by a typing error; so
is a choice that leaves nothing over. Cost grows with the number of names, times that of patterns.
Does not: know tensors.
"""

from __future__ import annotations

import fnmatch
import re
from typing import TYPE_CHECKING, Any, Final

from holdfast.errors import ConfigError, listed
from holdfast.validation import checked_names

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

_MAGIC: Final = frozenset("*?[")


class NameChoice:
    """The names that one of ``include`` matches (None: all), without those that one of ``exclude`` does."""

    def __init__(self, include: Any = None, exclude: Any = None) -> None:
        """include, exclude: a word, or several. Raises `ConfigError` for what isn't a name, or none."""
        self._include = None if include is None else NameWords(include, field="include")
        self._exclude = NameWords(() if exclude is None else exclude, field="exclude", may_be_empty=True)

    @property
    def takes_all(self) -> bool:
        """Return True if no name is left out."""
        return self._include is None and not self._exclude.words

    def takes(self, name: str) -> bool:
        """Return True if the tensor ``name`` is chosen."""
        return (self._include is None or self._include.match(name)) and not self._exclude.match(name)

    def check(self, names: Collection[str], *, where: str) -> None:
        """Raise `ConfigError` for a word that matches none of ``names``, or if none of them is chosen."""
        for words in (self._include, self._exclude):
            if words is not None:
                words.check(names, where=where)
        if names and not self.takes_all and not any(map(self.takes, names)):
            raise ConfigError(
                f"exclude: include and exclude leave nothing of what is {where}; there are {listed(sorted(names))}",
                field="exclude",
            )


class NameWords:
    """The words of one argument."""

    def __init__(self, given: Any, *, field: str, may_be_empty: bool = False) -> None:
        """given: a word, or several. Raises `ConfigError` for what isn't a name, or none."""
        self.field = field
        self.words = checked_names(given, field=field, may_be_empty=may_be_empty)
        self._prefixes = frozenset(word for word in self.words if _MAGIC.isdisjoint(word))
        self._patterns = {word: re.compile(fnmatch.translate(word)) for word in self.words if _MAGIC.intersection(word)}

    def match(self, name: str) -> bool:
        """Return True if one of them matches ``name``."""
        if self._prefixes and any(above in self._prefixes for above in _above(name)):
            return True
        return any(pattern.match(name) for pattern in self._patterns.values())

    def check(self, names: Collection[str], *, where: str) -> None:
        """Raise `ConfigError` for a word that matches none of ``names``."""
        unknown = [repr(word) for word in self._unknown(names)]
        if unknown:
            raise ConfigError(
                f"{self.field}: {', '.join(unknown[:5])} matches nothing {where}; there are "
                f"{listed(sorted(names)) or 'none'}. A word is a dotted prefix of names, or a pattern such as "
                "'*.lora_*'",
                field=self.field,
            )

    def _unknown(self, names: Collection[str]) -> list[str]:
        known = {above for name in names for above in _above(name)} if self._prefixes else set()
        found = [word for word in self.words if word in self._prefixes and word not in known]
        return found + [word for word, pattern in self._patterns.items() if not any(map(pattern.match, names))]


def _above(name: str) -> Iterator[str]:
    """Yield ``name`` and all its dotted prefixes."""
    yield name
    at = name.rfind(".")
    while at > 0:
        yield name[:at]
        at = name.rfind(".", 0, at)
