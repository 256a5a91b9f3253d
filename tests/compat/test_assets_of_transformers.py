"""Assets made of real configurations, tokenizers, processors and models, against what ``save_pretrained`` writes."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from holdfast.errors import ConfigError, StorageError
from holdfast.export.assets import HELD_BYTES_MAX, AssetSet, collect_assets

transformers = pytest.importorskip("transformers", minversion="5.0")

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def tiny_config(**more: Any) -> Any:
    return transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        bos_token_id=1,
        eos_token_id=2,
        **more,
    )


@pytest.fixture(scope="module")
def model() -> Any:
    found = transformers.LlamaForCausalLM(tiny_config(dtype="float32"))
    found.generation_config.temperature = 0.5
    found.generation_config.do_sample = True
    return found


def make_tokenizer(words: tuple[str, ...] = ("a", "b")) -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    vocabulary = {word: number for number, word in enumerate(("<unk>", "<s>", "</s>", *words))}
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="<unk>")),
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
    )
    made.chat_template = {"default": TEMPLATE, "tools": TEMPLATE + "tools"}
    return made


def contents(found: AssetSet) -> dict[str, bytes]:
    assert list(found.paths) == sorted(found.paths)
    for asset in found.files:
        assert len(asset.read()) == asset.size
    return {asset.path: asset.read() for asset in found.files}


def below(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and "safetensors" not in path.name
    }


def write_all(item: Any, directory: Path) -> dict[str, bytes]:
    item.save_pretrained(directory)
    return below(directory)


# objects -------------------------------------------------------------------------------------------------------


def test_nothing_given_is_nothing() -> None:
    assert collect_assets() == AssetSet()
    assert collect_assets([]) == AssetSet()
    assert collect_assets(model=nn.Linear(1, 1)) == AssetSet()


def test_objects_are_what_they_save(tmp_path: Path) -> None:
    config, tokenizer = tiny_config(), make_tokenizer()
    generation = transformers.GenerationConfig(max_new_tokens=7)
    expected = {
        **write_all(config, tmp_path / "a"),
        **write_all(generation, tmp_path / "b"),
        **write_all(tokenizer, tmp_path / "c"),
    }
    assert {"config.json", "generation_config.json", "tokenizer.json", "additional_chat_templates/tools.jinja"} <= set(
        expected
    )
    assert contents(collect_assets([config, generation, tokenizer])) == expected
    assert contents(collect_assets((config, generation), tokenizer)) == expected
    assert contents(collect_assets(config)) == write_all(config, tmp_path / "d")


def test_a_processor_brings_its_tokenizer(tmp_path: Path) -> None:
    extractor = transformers.WhisperFeatureExtractor(feature_size=8)
    processor = transformers.Wav2Vec2Processor(transformers.Wav2Vec2FeatureExtractor(), make_tokenizer())
    expected = {**write_all(extractor, tmp_path / "a"), **write_all(processor, tmp_path / "b")}
    assert contents(collect_assets([extractor, processor])) == expected


def test_the_live_configuration_is_left_alone(tmp_path: Path) -> None:
    config = tiny_config(dtype="float32")
    before = config.to_json_string()
    found = contents(collect_assets(config, dtype=torch.bfloat16))
    assert config.to_json_string() == before
    assert json.loads(found["config.json"])["dtype"] == "bfloat16"
    config.dtype = "bfloat16"
    assert found == write_all(config, tmp_path / "a")


def test_two_tokenizers_are_not_mixed(tmp_path: Path) -> None:
    source = tmp_path / "source"
    tiny_config().save_pretrained(source)
    make_tokenizer(("old",)).save_pretrained(source)
    for stale in (
        "merges.txt",
        "vocab.json",
        "tokenizer.model",
        "qwen.tiktoken",
        "additional_chat_templates/old.jinja",
    ):
        (source / stale).write_text("{}")
    (source / "README.md").write_text("mine")
    new = write_all(make_tokenizer(("new",)), tmp_path / "new")
    expected = {"README.md": b"mine", "config.json": (source / "config.json").read_bytes(), **new}
    assert contents(collect_assets(source, make_tokenizer(("new",)))) == expected
    assert contents(collect_assets(source, tmp_path / "new")) == expected
    assert contents(collect_assets(str(source), str(source)))["tokenizer.json"] == below(source)["tokenizer.json"]


# directories ---------------------------------------------------------------------------------------------------


def test_a_directory_is_its_files_without_weights(model: Any, tmp_path: Path) -> None:
    source = tmp_path / "source"
    model.save_pretrained(source, max_shard_size=1000)
    make_tokenizer().save_pretrained(source)
    (source / "modeling_mine.py").write_text("x = 1\n")
    (source / ".env").write_text("TOKEN=1")
    (source / "vocabulary.txt").write_bytes(b"w" * (HELD_BYTES_MAX + 1))
    found = collect_assets(source)
    assert contents(found) == {path: data for path, data in below(source).items() if path != ".env"}
    assert "model.safetensors.index.json" in {item.path for item in found.left_out}
    assert {asset.path for asset in found.files if asset.data is None} == {"vocabulary.txt"}
    assert found.nbytes == sum(map(len, contents(found).values()))
    (source / "vocabulary.txt").write_bytes(b"w")
    with pytest.raises(StorageError, match=r"vocabulary\.txt was a plain file of"):
        contents(found)


@pytest.mark.parametrize(("key", "said"), [("dtype", "bfloat16"), ("torch_dtype", "bfloat16"), ("other", None)])
def test_a_directorys_configuration_says_the_type_of_the_export(key: str, said: str | None, tmp_path: Path) -> None:
    text = json.dumps({"model_type": "llama", key: "float32"})
    (tmp_path / "config.json").write_text(text)
    assert contents(collect_assets(tmp_path))["config.json"] == text.encode()
    assert contents(collect_assets(tmp_path, dtype="float32"))["config.json"] == text.encode()
    found = json.loads(contents(collect_assets(tmp_path, dtype=torch.bfloat16))["config.json"])
    assert found == {"model_type": "llama", key: said or "float32"}


def test_members_of_a_configuration_can_be_set(model: Any, tmp_path: Path) -> None:
    updates = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    tiny_config().save_pretrained(tmp_path)
    for given in ({"assets": tmp_path}, {"assets": tiny_config()}, {"model": model}):
        found = json.loads(contents(collect_assets(**given).with_config(updates))["config.json"])
        assert found["quantization_config"] == updates["quantization_config"]
        assert found["model_type"] == "llama"
    with pytest.raises(ConfigError, match=r"no config\.json"):
        collect_assets().with_config(updates)
    with pytest.raises(ConfigError, match=r"can't go into config\.json"):
        collect_assets(tmp_path).with_config({"x": object()})


# models --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_model_says_what_save_pretrained_says(model: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    before = model.config.to_json_string()
    found = contents(collect_assets(model=model, dtype=dtype))
    assert model.config.to_json_string() == before
    other = transformers.LlamaForCausalLM(tiny_config(dtype="float32")).to(dtype)
    other.generation_config = model.generation_config
    assert found == write_all(other, tmp_path / "a")
    assert json.loads(found["config.json"])["architectures"] == ["LlamaForCausalLM"]


def test_without_a_type_a_model_says_its_own(tmp_path: Path) -> None:
    made = transformers.LlamaModel(tiny_config()).to(torch.bfloat16)
    assert contents(collect_assets(model=made)) == write_all(made, tmp_path / "a")


def test_a_models_configuration_goes_before_a_directorys_and_an_object_before_both(model: Any, tmp_path: Path) -> None:
    tiny_config(rope_theta=123.0).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text("{}")
    (tmp_path / "notes.md").write_text("kept")
    found = contents(collect_assets(tmp_path, model=model, dtype="bfloat16"))
    own = contents(collect_assets(model=model, dtype="bfloat16"))
    assert found == {**own, "notes.md": b"kept"}
    chosen = tiny_config(max_position_embeddings=99)
    told = json.loads(contents(collect_assets([tmp_path, chosen], model=model, dtype="bfloat16"))["config.json"])
    assert (told["max_position_embeddings"], told["dtype"]) == (99, "bfloat16")
    assert told["architectures"] == ["LlamaForCausalLM"]


def test_what_is_wrapped_around_a_model_leaves_no_trace(model: Any) -> None:
    expected = contents(collect_assets(model=model))
    assert contents(collect_assets(model=torch.compile(model, backend="eager"))) == expected
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert contents(collect_assets(model=nn.parallel.DistributedDataParallel(model))) == expected
        sharded = transformers.LlamaForCausalLM(tiny_config(dtype="float32"))
        sharded.generation_config = model.generation_config
        fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
        assert type(sharded).__name__ == "FSDPLlamaForCausalLM"
        assert contents(collect_assets(model=sharded)) == expected
    finally:
        dist.destroy_process_group()


def test_custom_code_comes_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "code" / "mine"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "layers_mine.py").write_text("SIZE = 4\n")
    (package / "configuration_mine.py").write_text(
        "from transformers import LlamaConfig\nclass MineConfig(LlamaConfig):\n    model_type = 'mine'\n"
    )
    (package / "modeling_mine.py").write_text(
        "from transformers import LlamaForCausalLM\nfrom .configuration_mine import MineConfig\n"
        "from .layers_mine import SIZE\nclass MineModel(LlamaForCausalLM):\n    config_class = MineConfig\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "code")
    module = importlib.import_module("mine.modeling_mine")
    try:
        module.MineConfig.register_for_auto_class()
        module.MineModel.register_for_auto_class("AutoModelForCausalLM")
        made = module.MineModel(module.MineConfig(**tiny_config().to_dict() | {"model_type": "mine"}))
        before = made.config.to_json_string()
        found = contents(collect_assets(model=made, dtype="bfloat16"))
        assert made.config.to_json_string() == before
        assert {"modeling_mine.py", "configuration_mine.py", "layers_mine.py"} <= set(found)
        assert json.loads(found["config.json"])["auto_map"] == {
            "AutoConfig": "configuration_mine.MineConfig",
            "AutoModelForCausalLM": "modeling_mine.MineModel",
        }
        made.to(torch.bfloat16)
        assert found == write_all(made, tmp_path / "saved")
    finally:
        for name in [name for name in sys.modules if name == "mine" or name.startswith("mine.")]:
            del sys.modules[name]


@dataclass
class LoraSettings:
    """As PEFT's configurations: a dataclass that saves itself."""

    r: int = 8
    inference_mode: bool = False
    base_model_name_or_path: str | None = None

    def save_pretrained(self, directory: str) -> None:
        Path(directory, "adapter_config.json").write_text(json.dumps(self.__dict__))


def test_an_adapter_has_its_own_configuration_and_no_model_configuration(tmp_path: Path) -> None:
    made = transformers.LlamaForCausalLM(tiny_config(name_or_path="base/model"))
    made.name_or_path = "base/model"
    made.peft_config = {"default": LoraSettings(), "other": LoraSettings(r=4)}
    tiny_config().save_pretrained(tmp_path)
    found = contents(collect_assets([tmp_path, make_tokenizer()], model=made, adapter="other"))
    assert "config.json" not in found
    assert "tokenizer.json" in found
    assert json.loads(found["adapter_config.json"]) == {
        "r": 4,
        "inference_mode": True,
        "base_model_name_or_path": "base/model",
    }
    assert made.peft_config["other"] == LoraSettings(r=4)
    del made.peft_config["other"]
    assert json.loads(contents(collect_assets(model=made, adapter=True))["adapter_config.json"])["r"] == 8
    assert list(contents(collect_assets(LoraSettings(r=2), adapter=True))) == ["adapter_config.json"]
    with pytest.raises(ConfigError, match="which adapter"):
        collect_assets(model=made, adapter="none")
    del made.peft_config
    with pytest.raises(ConfigError, match=r"needs its adapter_config\.json"):
        collect_assets(model=made, adapter=True)


# bad input -----------------------------------------------------------------------------------------------------


def test_a_directory_without_a_configuration_is_refused(model: Any, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    for given in (None, model, nn.Linear(1, 1)):
        with pytest.raises(ConfigError, match=r"has no config\.json"):
            collect_assets(tmp_path, model=given)
    assert collect_assets(tokenizer=tmp_path, model=nn.Linear(1, 1)).paths == ("tokenizer.json",)
    (tmp_path / "config.json").symlink_to("nowhere")
    with pytest.raises(ConfigError, match="leads nowhere"):
        collect_assets(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "\ufeff{}"])
def test_a_configuration_that_nobody_can_read_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json among the assets"):
        collect_assets(tmp_path)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"assets": "meta-llama/Llama-3.1-8B"}, "aren't downloaded"),
        ({"assets": "s3://bucket/model"}, "object stores"),
        ({"assets": 3}, "3 is not an asset"),
        ({"assets": [None]}, "None is not an asset"),
        ({"assets": {"config": 1}}, "not an asset"),
        ({"assets": nn.Linear(1, 1)}, "Linear can't be an asset"),
        ({"tokenizer": 3}, "3 is not a tokenizer"),
        ({"tokenizer": "none/there"}, "doesn't exist"),
        ({"dtype": "float13"}, "float13"),
    ],
)
def test_what_is_no_asset_is_said(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        collect_assets(**given)


def test_a_model_is_no_asset_and_a_file_is_no_directory(model: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="LlamaForCausalLM can't be an asset"):
        collect_assets(model)
    with pytest.raises(ConfigError, match="LlamaForCausalLM can't be an asset"):
        collect_assets([tmp_path, model])
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="is a file"):
        collect_assets(tmp_path / "config.json")


def test_what_can_not_be_saved_is_said(tmp_path: Path) -> None:
    class Broken:
        def save_pretrained(self, directory: str) -> None:
            raise ValueError("no vocabulary")

    class Escaping:
        def save_pretrained(self, directory: str) -> None:
            Path(directory, ".hidden").write_text("x")

    class Heavy:
        def save_pretrained(self, directory: str) -> None:
            Path(directory, "extra.safetensors").write_text("x")

    with pytest.raises(ConfigError, match=r"Heavy has saved 'extra\.safetensors'.*weights"):
        collect_assets(Heavy())
    with pytest.raises(ConfigError, match="Broken can't be saved: no vocabulary"):
        collect_assets(Broken())
    with pytest.raises(ConfigError, match=r"Escaping has saved '\.hidden'"):
        collect_assets(Escaping())
    generation = transformers.GenerationConfig()
    generation.temperature, generation.do_sample = 0.5, False
    with pytest.raises(ConfigError, match="GenerationConfig can't be saved"):
        collect_assets([tiny_config(), generation])


def test_files_that_the_export_writes_itself(tmp_path: Path) -> None:
    found = collect_assets(tiny_config())
    found.require_apart_from(["model.safetensors"])
    with pytest.raises(ConfigError, match=r"config\.json"):
        found.require_apart_from(["config.json", "other"])
