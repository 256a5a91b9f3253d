"""Hugging Face exports on every server: published once, replaced on request, deleted whole, and loaded from there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from _export_models import tiny_model

import holdfast
from holdfast.errors import CheckpointExists, StorageError
from holdfast.export.verify import verify_export
from holdfast.storage.local import open_storage
from holdfast.validation import located

pytest.importorskip("transformers")

SHARD_BYTES = 20_000


def test_an_export_is_published_replaced_loaded_and_deleted(root: str, tmp_path: Path) -> None:
    first, second = tiny_model("llama"), tiny_model("llama")
    first.config.save_pretrained(tmp_path / "source")
    (tmp_path / "source" / "additional_chat_templates").mkdir()
    (tmp_path / "source" / "additional_chat_templates" / "tools.jinja").write_text("{{ 1 }}")
    out = located(f"{root}/hf")
    assert str(holdfast.export_hf(first, out, max_shard_bytes=SHARD_BYTES, assets=tmp_path / "source")) == out
    with pytest.raises(CheckpointExists):
        holdfast.export_hf(second, out)
    assert verify_export(out) == ()
    if root.startswith("fsspec+"):
        with pytest.raises(StorageError, match="If-Match"):
            holdfast.export_hf(second, out, overwrite=True)
        assert holdfast.delete(out)
        holdfast.export_hf(second, out)
    else:
        holdfast.export_hf(second, out, overwrite=True)
    assert verify_export(out) == ()
    assert holdfast.open(out).verify().ok
    holdfast.load({"model": first}, out)
    for name, tensor in second.state_dict().items():
        assert torch.equal(first.state_dict()[name], tensor), name
    assert holdfast.delete(out)
    holdfast.export_hf(first, out, assets=tmp_path / "source")
    assert verify_export(out) == ()


def test_retention_takes_exports_whole(root: str) -> None:
    model = tiny_model("llama")
    export = holdfast.HFExport(f"{root}/hf", every=1, keep=holdfast.Keep(last=1))
    with holdfast.CheckpointManager(f"{root}/run", {"model": model}, exports=[export]) as manager:
        for step in (1, 2):
            for handle in manager.step(step):
                assert handle.exception(60) is None
    storage = open_storage(located(f"{root}/hf"))
    kept = [name for name in storage.list_dir("") if storage.size(f"{name}/holdfast.json") is not None]
    assert [name for name in kept if name != "hf-latest"] == ["hf-2"]
