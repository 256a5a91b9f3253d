"""`HFExport` refuses what can't be exported when it is made, by the field's name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from holdfast.config import HFExport
from holdfast.errors import ConfigError

BAD: dict[str, tuple[Any, ...]] = {
    "root": ("", 3, None, b"path", "ftp://host/x", "s3://", "s3://bucket//x", "a\0b"),
    "every": (0, -1, 1.5, "500", True),
    "name_template": ("hf", "{step}/x", ".hf-{step}", "{step}{step}", "{}", "{step", "{step:x}", "hf-latest", 7),
    "keep": (3, {"last": 3}),
    "latest_link": (1, None),
    "dtype": ("bf16", "int8", torch.int64, 16, "float8_e5m2"),
    "fp32_keys": ("norm", [1], None),
    "max_shard_bytes": (0, None, 5e9),
    "modules": ("model", [1]),
    "nice": (-1, 20, None),
    "writers": (0, 17, None),
    "io_limit_bytes_per_s": (0, (1 << 20) - 1, 1e9),
}


@pytest.mark.parametrize("field", BAD)
def test_what_is_wrong_is_refused_by_its_name(field: str) -> None:
    for value in BAD[field]:
        with pytest.raises(ConfigError, match=rf"^HFExport\.{field}: expected .+, found ") as caught:
            HFExport(**{"root": "exports", field: value})
        assert caught.value.field == field


def test_a_root_may_be_on_an_object_store_where_there_are_no_links() -> None:
    export = HFExport("s3://bucket/exports/")
    assert (export.root, export.latest_link) == ("s3://bucket/exports", False)
    assert HFExport("file:///exports").root == "/exports"
    assert HFExport("exports").latest_link
    assert not HFExport("s3://bucket/exports", latest_link=True).latest_link


def test_what_can_be_exported_is_taken() -> None:
    export = HFExport("exports", every=None, name_template="hf_{step:08d}", dtype=torch.bfloat16, modules=["actor"])
    assert (export.every, export.dtype, export.modules) == (None, "bfloat16", ("actor",))
