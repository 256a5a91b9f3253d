"""Hugging Face exports to object stores: what is found after a plain download, what is replaced, what crashes leave.

No reader of a model looks at a store by itself: a copy of the prefix in a directory is what they get.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from _export_models import tiny_model
from _object_server import Server
from _on_stores import INDEX, as_vllm_reads, downloaded, environment

import holdfast
from holdfast.errors import CheckpointExists, ConfigError
from holdfast.export import exporter
from holdfast.export.verify import is_export, verify_export
from holdfast.storage.object_storage import ObjectStorage

pytest.importorskip("transformers")

ATTEMPT = re.compile(r"[0-9a-f]{12}")
SHARD_BYTES = 16_000


@pytest.fixture
def bucket(object_server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """A new one, which the environment leads to."""
    for name, value in environment(object_server.endpoint).items():
        monkeypatch.setenv(name, value)
    return object_server.bucket()


def plain(keys: list[str]) -> list[str]:
    """The keys with ``ID`` for the id of an attempt."""
    return [ATTEMPT.sub("ID", key) for key in keys]


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


# what readers find -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "max_shard_bytes"), [("llama-tied", 1 << 30), ("qwen3", SHARD_BYTES)])
def test_a_plain_download_is_what_transformers_and_vllm_read(
    kind: str, max_shard_bytes: int, bucket: str, object_server: Server, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    model = tiny_model(kind)
    url = f"s3://{bucket}/run/hf"
    assert holdfast.export_hf(model, url, dtype="bfloat16", max_shard_bytes=max_shard_bytes) == url
    keys = plain(object_server.keys(bucket))
    assert "run/hf/model.safetensors" not in keys, "readers would look for no index beside it"
    weights = [key for key in keys if key.endswith(".safetensors")]
    assert len(weights) == 1 if max_shard_bytes > SHARD_BYTES else len(weights) > 2
    assert all(key.endswith(".ID.safetensors") for key in weights)
    assert {f"run/hf/{name}" for name in ("config.json", "generation_config.json", INDEX, "holdfast.json")} <= set(keys)
    there = downloaded(url, tmp_path)
    expected = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    loaded = AutoModelForCausalLM.from_pretrained(there, dtype="auto")
    same(loaded.state_dict(), expected)
    assert as_vllm_reads(there), "each once"
    assert verify_export(str(there)) == ()
    assert verify_export(url) == ()
    assert is_export(url)


OF_PEFT = pytest.mark.filterwarnings("ignore::FutureWarning:transformers")


@OF_PEFT
def test_an_adapter_has_the_name_that_readers_know(bucket: str, object_server: Server, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> Any:
        torch.manual_seed(0)
        return peft.get_peft_model(tiny_model("llama"), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))

    model = adapted()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "lora" in name:
                tensor.normal_()
    url = f"s3://{bucket}/adapter"
    holdfast.export_hf(model, url)
    assert {"adapter/adapter_config.json", "adapter/adapter_model.safetensors"} <= set(object_server.keys(bucket))
    there = downloaded(url, tmp_path)
    assert verify_export(url) == verify_export(str(there)) == ()
    loaded = peft.PeftModel.from_pretrained(adapted().unload(), there)
    expected = {name: tensor for name, tensor in model.state_dict().items() if "lora" in name}
    assert expected
    same({name: tensor for name, tensor in loaded.state_dict().items() if "lora" in name}, expected)


@OF_PEFT
def test_an_adapter_that_no_store_can_copy_is_refused(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny_model("llama"), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    monkeypatch.setattr(exporter, "COPY_BYTES_MAX", 100)
    with pytest.raises(ConfigError, match=r"adapter_model\.safetensors would have .+ Export it to a directory"):
        holdfast.export_hf(model, f"s3://{bucket}/adapter")
    assert verify_export(f"s3://{bucket}/adapter") == ()


def test_files_of_a_source_model_come_along(bucket: str, tmp_path: Path) -> None:
    """Of chat templates readers take whatever ends in ``.jinja``."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    model, url = tiny_model("llama"), f"s3://{bucket}/hf"
    tokens = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokens))
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    tokenizer.chat_template = {"default": "{{ 1 }}", "tools": "{{ 2 }}"}
    tokenizer.save_pretrained(tmp_path / "source")
    model.config.save_pretrained(tmp_path / "source")
    (tmp_path / "source" / "modeling_own.py").write_text("OWN = 1\n")
    holdfast.export_hf(model, url, assets=tmp_path / "source")
    there = downloaded(url, tmp_path / "there")
    found = AutoTokenizer.from_pretrained(there)
    assert found.chat_template == tokenizer.chat_template
    assert found.convert_tokens_to_ids("b") == 1
    assert (there / "modeling_own.py").read_text() == "OWN = 1\n"
    assert verify_export(url) == ()


def test_other_urls_are_directories(tmp_path: Path) -> None:
    model = tiny_model("llama")
    name = f"holdfast-tests-{os.getpid()}"
    found = holdfast.export_hf(model, f"file://{tmp_path}/hf")
    assert found == tmp_path / "hf"
    assert (tmp_path / "hf" / "model.safetensors").exists()
    found = Path(holdfast.export_hf(model, f"memory://{name}/hf"))
    try:
        assert found.name == "hf"
        same(as_vllm_reads(found), model.state_dict())
    finally:
        shutil.rmtree(found.parent)


def test_a_run_starts_from_an_export_on_a_store(bucket: str, tmp_path: Path) -> None:
    model, other = tiny_model("llama"), tiny_model("llama")
    with torch.no_grad():
        other.lm_head.weight.zero_()
    holdfast.export_hf(model, f"s3://{bucket}/hf")
    config = holdfast.CheckpointConfig(initial_load_path=f"s3://{bucket}/hf")
    with holdfast.CheckpointManager(tmp_path / "run", {"model": other}, config=config) as manager:
        assert manager.restore() is None
    same(other.state_dict(), model.state_dict())


def test_in_the_background_and_from_a_manager(bucket: str, object_server: Server, tmp_path: Path) -> None:
    model = tiny_model("llama")
    handle = holdfast.async_export_hf({"model": model}, f"s3://{bucket}/later", staging="eager")
    assert handle.result(60).path == f"s3://{bucket}/later"
    same(as_vllm_reads(downloaded(f"s3://{bucket}/later", tmp_path / "later")), model.state_dict())
    export = holdfast.HFExport(f"s3://{bucket}/hf", every=1, keep=holdfast.Keep(last=2))
    config = holdfast.CheckpointConfig(every=2)
    with holdfast.CheckpointManager(tmp_path / "run", {"model": model}, config=config, exports=[export]) as manager:
        for step in range(1, 5):
            with torch.no_grad():
                model.lm_head.weight.fill_(step)
            for handle in manager.step(step):
                assert handle.exception(60) is None
    names = {key.split("/")[1] for key in object_server.keys(bucket) if key.startswith("hf/")}
    assert names - {".holdfast"} == {"hf-3", "hf-4"}
    for step in (3, 4):
        found = as_vllm_reads(downloaded(f"s3://{bucket}/hf/hf-{step}", tmp_path / str(step)))
        assert found["lm_head.weight"].eq(step).all()
    assert not [key for key in object_server.keys(bucket) if "attempts" in key], "nothing is left to be settled"


def test_a_manager_on_the_same_store(bucket: str, tmp_path: Path) -> None:
    model = tiny_model("llama")
    export = holdfast.HFExport(f"s3://{bucket}/run/hf", every=1)
    with holdfast.CheckpointManager(f"s3://{bucket}/run/steps", {"model": model}, exports=[export]) as manager:
        for handle in manager.step(1):
            assert handle.exception(60) is None
    same(as_vllm_reads(downloaded(f"s3://{bucket}/run/hf/hf-1", tmp_path)), model.state_dict())
    with pytest.raises(ConfigError, match="is the manager's own root"):
        holdfast.CheckpointManager(f"s3://{bucket}/run/hf/", {"model": model}, exports=[export])


# what is replaced ---------------------------------------------------------------------------------------------------


def test_what_was_there_is_replaced_only_on_request(bucket: str, object_server: Server, tmp_path: Path) -> None:
    first, second = tiny_model("llama"), tiny_model("llama")
    url = f"s3://{bucket}/hf"
    holdfast.export_hf(first, url, max_shard_bytes=SHARD_BYTES)
    before = object_server.keys(bucket)
    with pytest.raises(CheckpointExists):
        holdfast.export_hf(second, url)
    assert object_server.keys(bucket) == before
    object_server.request("PUT", f"/{bucket}/hf/README.md", b"mine")
    holdfast.export_hf(second, url, overwrite=True)
    there = downloaded(url, tmp_path)
    same(as_vllm_reads(there), second.state_dict())
    assert (there / "README.md").read_text() == "mine"
    assert verify_export(url) == ()


def test_weights_of_others_that_readers_would_take_for_ours_go(
    bucket: str, object_server: Server, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    model = tiny_model("llama")
    tiny_model("llama").save_pretrained(tmp_path / "old")
    for path in (tmp_path / "old").iterdir():
        object_server.request("PUT", f"/{bucket}/hf/{path.name}", path.read_bytes())
    url = f"s3://{bucket}/hf"
    with pytest.raises(CheckpointExists):
        holdfast.export_hf(model, url)
    holdfast.export_hf(model, url, overwrite=True)
    loaded = AutoModelForCausalLM.from_pretrained(downloaded(url, tmp_path / "new"))
    same(loaded.state_dict(), model.state_dict())


CHILD = """
import os, signal, sys
import torch
from _export_models import tiny_model
import holdfast
from holdfast.storage.object_storage import ObjectStorage

url, fill, point = sys.argv[1:]
if point:
    def die(*args, **options):
        os.kill(os.getpid(), signal.SIGKILL)
    setattr(ObjectStorage, point, die)
model = tiny_model("llama")
with torch.no_grad():
    model.lm_head.weight.fill_(float(fill))
try:
    holdfast.export_hf(model, url, overwrite="overwrite" in os.environ)
except holdfast.HoldfastError as error:
    sys.exit(f"{error} {type(error).__name__}")
"""


def exported_elsewhere(url: str, fill: int, point: str = "", **more: str) -> subprocess.CompletedProcess[str]:
    """Export ``fill`` to ``url`` in another process, which dies when it calls ``point`` of its storage."""
    here = Path(__file__).parents[1]
    path = os.pathsep.join([str(here / "unit"), str(Path(holdfast.__file__).parents[1])])
    return subprocess.run(
        [sys.executable, "-c", CHILD, url, str(fill), point],
        env={**os.environ, "PYTHONPATH": path, **more},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def head_of(url: str, directory: Path) -> float:
    found = as_vllm_reads(downloaded(url, directory))["lm_head.weight"].unique()
    assert found.numel() == 1
    return float(found)


@pytest.mark.slow
def test_of_several_that_race_one_is_published_and_nothing_else_is_left(
    bucket: str, object_server: Server, tmp_path: Path
) -> None:
    url = f"s3://{bucket}/hf"
    with ThreadPoolExecutor(3) as racing:
        ended = list(racing.map(lambda fill: exported_elsewhere(url, fill), (1, 2, 3)))
    assert sorted(child.returncode for child in ended) == [0, 1, 1], [child.stderr for child in ended]
    losers = [child.stderr for child in ended if child.returncode]
    # There is no lock: a start may fence an export that has begun and shows no sign of life yet, which fails then.
    assert {said.split()[-1] for said in losers} <= {"CheckpointExists", "SaveFailed"}, losers
    assert [float(fill) for fill, child in enumerate(ended, 1) if not child.returncode] == [head_of(url, tmp_path)]
    assert verify_export(url) == ()
    attempt = json.loads((tmp_path / "holdfast.json").read_text())["attempt"]
    others = [key for key in object_server.keys(bucket) if ATTEMPT.search(key) and attempt not in key]
    assert set(plain(others)) <= {"hf/holdfast.ID.json"}, "voids may stay"


def test_of_two_that_overwrite_the_last_one_has_all_names(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first has replaced the manifest, and puts its plain names after the second has put all of its own."""
    url = f"s3://{bucket}/hf"
    put_faces = ObjectStorage._put_faces

    def late(self: ObjectStorage, *args: Any) -> None:
        monkeypatch.setattr(ObjectStorage, "_put_faces", put_faces)
        child = exported_elsewhere(url, 7, overwrite="1")
        assert child.returncode == 0, child.stderr
        put_faces(self, *args)

    monkeypatch.setattr(ObjectStorage, "_put_faces", late)
    holdfast.export_hf(tiny_model("llama"), url, overwrite=True)
    assert head_of(url, tmp_path) == 7
    assert verify_export(url) == ()


# what a crash leaves ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "point",
    [
        pytest.param("begin", marks=pytest.mark.slow),
        "target",
        pytest.param("seal", marks=pytest.mark.slow),
        "publish",
        pytest.param("_put_faces", marks=pytest.mark.slow),
    ],
)
def test_an_export_that_was_killed_is_finished_or_gone(
    point: str, bucket: str, object_server: Server, tmp_path: Path
) -> None:
    """Where all was put and only the commit is missing, the next start finishes it."""
    url = f"s3://{bucket}/hf"
    assert exported_elsewhere(url, 7, point).returncode < 0
    model = tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight.fill_(8)
    try:
        holdfast.export_hf(model, url)
        expected = 8
    except CheckpointExists:
        expected = 7
    assert expected == (8 if point in ("begin", "target") else 7)
    assert head_of(url, tmp_path) == expected
    assert verify_export(url) == ()
    assert not [key for key in object_server.keys(bucket) if "attempts" in key]


# what is found ------------------------------------------------------------------------------------------------------


def test_damage_on_a_store_is_found(bucket: str, object_server: Server) -> None:
    url = f"s3://{bucket}/hf"
    holdfast.export_hf(tiny_model("llama"), url, max_shard_bytes=SHARD_BYTES)
    keys = object_server.keys(bucket)
    weights = [key for key in keys if key.endswith(".safetensors")]
    index = json.loads(object_server.request("GET", f"/{bucket}/hf/{INDEX}")[1])

    def said() -> list[str]:
        return [problem.path.removeprefix(f"{url}/") for problem in verify_export(url)]

    object_server.request("PUT", f"/{bucket}/hf/model-00009-of-00009.0123456789ab.safetensors", b"of another attempt")
    assert said() == []
    whole = object_server.request("GET", f"/{bucket}/{weights[0]}")[1]
    object_server.request("PUT", f"/{bucket}/{weights[0]}", whole[:-1])
    assert said() == [weights[0].removeprefix("hf/")]
    object_server.request("DELETE", f"/{bucket}/{weights[0]}")
    assert said() == [INDEX]
    object_server.request("PUT", f"/{bucket}/{weights[0]}", whole)
    assert said() == []
    object_server.request("PUT", f"/{bucket}/hf/config.json", b"{}")
    assert said() == ["config.json"]
    object_server.request("DELETE", f"/{bucket}/hf/config.json")
    assert said() == ["config.json"]
    index["weight_map"].popitem()
    object_server.request("PUT", f"/{bucket}/hf/{INDEX}", json.dumps(index).encode())
    assert set(said()) == {"config.json", INDEX}
