"""Faces: which objects of an attempt get plain-named copies, for readers that know nothing of attempts. Torch-free.

    step-100/config.0123456789ab.json                 an object of the attempt, which the manifest names
    step-100/config.json                              its face, copied by the store once the attempt is published

Every small file that the manifest lists has one. Of data files those have one that it lists under `FACES`: readers of
an adapter look for ``adapter_model.safetensors``, and for no index that could name another file.

Does not: put or remove them (`holdfast.storage.object_storage` does).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from holdfast.format.manifest import METADATA_NAME
from holdfast.storage.entries import attempt_of
from holdfast.validation import name_fault

if TYPE_CHECKING:
    from collections.abc import Iterable

    from holdfast.format.manifest import Manifest

FACES: Final = "faces"
"""Member of `Manifest.extra`: the plain names of data files that have a face."""
COPY_BYTES_MAX: Final = 5 << 30
"""Largest object that every store copies by one request."""
_WEIGHTS: Final = re.compile(r"(.+?)(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
"""Files of weights and their index, by their common stem."""


def data_faces(manifest: Manifest) -> list[str]:
    """Return the plain names of data files that have a face."""
    listed = manifest.extra.get(FACES)
    return [name for name in listed if type(name) is str and name_fault(name) is None] if type(listed) is list else []


def outdated_weights(entries: Iterable[str], faces: Iterable[str]) -> list[str]:
    """Return plain-named weights among ``entries`` that other readers would take for those of ``faces``.

    They were there before what is published now: a reader that finds ``model.safetensors`` looks for no index.
    """
    own = set(faces)
    stems = {match[1] for name in own if (match := _WEIGHTS.fullmatch(name))}
    others = [(entry, _WEIGHTS.fullmatch(entry)) for entry in entries if entry not in own and attempt_of(entry) is None]
    return sorted(entry for entry, match in others if match is not None and match[1] in stems)


def last_what_makes_it_visible(face: tuple[str, str]) -> tuple[bool, str]:
    """Order faces, (plain name, name of the object): those by which other readers know a model come last."""
    plain = face[0]
    return plain.endswith((".index.json", ".safetensors")) or plain in ("config.json", METADATA_NAME), plain
