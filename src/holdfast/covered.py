"""The data files of a committed directory, as the reports of all ranks tell them together. Torch-free, no I/O.

Guarantees: a file belongs to one rank, or to the several that wrote parts of it: what is covered twice, or by nobody,
is `CheckpointCorrupt` that names file and byte range, and so is a report of the other kind of delivery.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from holdfast.errors import CheckpointCorrupt
from holdfast.format.manifest import MANIFEST_NAME, report_name
from holdfast.format.parts import join, parts_in
from holdfast.storage.descriptors import StoredFile

if TYPE_CHECKING:
    from collections.abc import Iterable

    from holdfast.format.manifest import Manifest, Report, ReportFile


def covered_files(
    directory: str, manifest: Manifest, reports: Iterable[Report], *, all_there: bool
) -> dict[str, StoredFile]:
    """The data files by name. ``all_there``: none of the reports is left out, so that there can't be a gap."""
    seen = {file.name for file in manifest.files}
    rows: list[ReportFile] = []
    for report in reports:
        path = os.path.join(directory, report_name(report.rank))
        if len(parts_in(report.files)) != (len(report.files) if manifest.kind == "export" else 0):
            raise CheckpointCorrupt(f"{path} can't be of a {manifest.kind}: it is about other files", path=path)
        for file in report.files:
            if file.name in seen:
                raise CheckpointCorrupt(f"{path} covers {file.name}, which is another's", path=path)
            rows.append(file)
        if manifest.kind == "checkpoint":
            seen.update(file.name for file in report.files)
    try:
        found = join(rows)
    except ValueError as error:
        path = os.path.join(directory, MANIFEST_NAME)
        raise CheckpointCorrupt(f"{path}: the reports in it contradict each other: {error}", path=path) from error
    for joined in found:
        for start, end in joined.gaps if all_there else ():
            path = os.path.join(directory, joined.name)
            raise CheckpointCorrupt(
                f"{path}: no report covers bytes {start} to {end}", path=path, byte_range=(start, end)
            )
    return {row.name: StoredFile(row.name, row.size, row.extents, row.gaps) for row in found}
