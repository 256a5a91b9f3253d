"""What travels: chosen names, key maps, dtypes, fp8, and slices at the receiver; over shared memory and a directory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import holdfast
from holdfast.errors import ConfigError, StateMismatch
from holdfast.export import AddPrefix, Fp8, HFDefault, Rename, SplitExperts, StackExperts, Transpose

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from _object_server import Server

sys.path.insert(0, str(Path(__file__).parents[2] / "distributed"))
from hf_models import KINDS, tiny

TIMEOUT_S = 20.0


@pytest.fixture(params=["shared memory", "directory"])
def transport(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Any]:
    if request.param == "directory":
        return lambda: holdfast.sync.DirectoryTransport(tmp_path / "versions")
    return lambda: holdfast.sync.SharedMemoryTransport(tmp_path / "meet")


@pytest.fixture
def publisher(transport: Callable[[], Any]) -> Iterator[Callable[..., holdfast.sync.Publisher]]:
    made: list[holdfast.sync.Publisher] = []

    def make(**options: Any) -> holdfast.sync.Publisher:
        for earlier in made:
            earlier.close()
        made.append(holdfast.sync.Publisher(transport(), bypass_cpu=False, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def all_of(transport: Callable[[], Any], **options: Any) -> dict[str, torch.Tensor]:
    """All that is published, by name."""
    found: dict[str, torch.Tensor] = {}
    with holdfast.sync.Receiver(transport(), **options) as receiver:
        receiver.receive(found.__setitem__, timeout=TIMEOUT_S)
    return found


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        bits = [one.contiguous().reshape(-1).view(torch.uint8) for one in (found[name], tensor) if tensor.numel()]
        assert not bits or torch.equal(*bits), name


# Names. ----------------------------------------------------------------------------------------------------------


def with_adapters() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
    for layer in model:
        layer.lora_A = nn.Parameter(torch.randn(3, 3))  # type: ignore[assignment]
        layer.lora_B = nn.Parameter(torch.randn(2, 2))  # type: ignore[assignment]
    return model


def test_adapters_alone_go_into_a_module_that_has_all(transport: Callable[[], Any], publisher: Any) -> None:
    trained, served = with_adapters(), with_adapters()
    before = {name: value.clone() for name, value in served.state_dict().items()}
    publisher(include="*.lora_*").publish(trained.state_dict(), 1)
    with holdfast.sync.Receiver(transport()) as strict, pytest.raises(StateMismatch, match="not published"):
        strict.receive(served, timeout=TIMEOUT_S)
    with holdfast.sync.Receiver(transport(), include="*.lora_*") as receiver:
        assert receiver.receive(served, timeout=TIMEOUT_S) == 1
        assert receiver.receive(served, version=1, timeout=TIMEOUT_S, streaming=True) == 1
    for name, value in served.state_dict().items():
        assert torch.equal(value, trained.state_dict()[name] if "lora" in name else before[name]), name


def test_a_few_names_of_many(transport: Callable[[], Any], publisher: Any) -> None:
    weights = {f"experts.{n}.w": torch.full((4, 2), float(n)) for n in range(12)} | {"norm": torch.ones(3)}
    publisher(exclude=["norm"]).publish(weights, 1)
    mine = {f"experts.{n}.w": torch.zeros(4, 2) for n in (1, 10)}
    with holdfast.sync.Receiver(transport(), include=list(mine)) as receiver:
        receiver.receive(mine, timeout=TIMEOUT_S)
    assert_equal(mine, {name: weights[name] for name in mine})
    assert all_of(transport, include="experts.1").keys() == {"experts.1.w"}, "a prefix ends at a dot"
    assert "norm" not in all_of(transport)


def test_a_misspelt_name_is_an_error_on_either_side(transport: Callable[[], Any], publisher: Any) -> None:
    weights = {"layers.0.w": torch.ones(2), "layers.1.w": torch.ones(2)}
    with pytest.raises(ConfigError, match=r"include: 'layer\.0' matches nothing") as caught:
        publisher(include=["layer.0", "layers.1"]).publish(weights, 1)
    assert caught.value.field == "include"
    with pytest.raises(ConfigError, match="leave nothing"):
        publisher(include="layers.0", exclude="*").publish(weights, 1)
    publisher().publish(weights, 1)
    mine = {name: torch.zeros(2) for name in weights}
    for field, word in (("include", "*.v"), ("exclude", "layers.2")):
        with holdfast.sync.Receiver(transport(), **{field: word}) as receiver:
            with pytest.raises(ConfigError, match="matches nothing") as caught:
                receiver.receive(mine, timeout=TIMEOUT_S)
            assert caught.value.field == field
            assert receiver.version is None
    assert not any(value.any() for value in mine.values())
    with holdfast.sync.Receiver(transport(), include="layers.0") as receiver:
        with pytest.raises(StateMismatch, match="not published"):
            receiver.receive({"layers.0.w": torch.zeros(2), "layers.0.v": torch.zeros(2)}, timeout=TIMEOUT_S)
        with pytest.raises(StateMismatch, match="no place for"):
            receiver.receive({"layers.1.w": torch.zeros(2)}, timeout=TIMEOUT_S)


@pytest.mark.parametrize("given", [3, "", [], [1]])
def test_what_is_no_name_is_refused(transport: Callable[[], Any], given: Any) -> None:
    with pytest.raises(ConfigError, match="include must be names"):
        holdfast.sync.Receiver(transport(), include=given)


# Layout and dtype. -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_travels_as_it_would_be_exported(
    kind: str, transport: Callable[[], Any], publisher: Any, tmp_path: Path
) -> None:
    model = tiny(kind, seed=3)
    holdfast.export_hf(model, tmp_path / "hf", dtype=torch.bfloat16, fp32_keys=["norm|ln_"], key_map=HFDefault())
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    sending = publisher(key_map=HFDefault(), dtype="bfloat16", fp32_keys=["norm|ln_"])
    sending.publish(model, 1)
    assert_equal(all_of(transport), exported)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    sending.publish(model, 2)
    assert_equal(all_of(transport), {name: tensor * 2 for name, tensor in exported.items()})


def state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    made = {f"l.{name}.weight": torch.randn(6, 8, generator=generator) for name in "qkv"}
    made |= {f"experts.{n}.w": torch.randn(4, 3, generator=generator) for n in range(3)}
    return made | {
        "stacked": torch.randn(3, 5, 2, generator=generator),
        "one": torch.tensor(4.0),
        "none": torch.empty(0, 3),
    }


def by_hand(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    made = {"qkv": torch.cat([given.pop(f"l.{name}.weight") for name in "qkv"])}
    experts = [given.pop(f"experts.{n}.w") for n in range(3)]
    made["experts"] = torch.stack(experts).transpose(1, 2)
    made["interleaved"] = given.pop("stacked").permute(1, 0, 2).reshape(15, 2)
    return made | {f"x.{name}": tensor for name, tensor in given.items()}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_a_function_as_key_map(transport: Callable[[], Any], publisher: Any, dtype: torch.dtype | None) -> None:
    weights = state()
    publisher(key_map=by_hand, dtype=dtype).publish(weights, 1)
    expected = by_hand(state())
    assert_equal(all_of(transport), {name: value.to(dtype or value.dtype) for name, value in expected.items()})


def test_rules_as_key_map(transport: Callable[[], Any], publisher: Any) -> None:
    weights = state()
    weights["l.turned.weight"] = torch.randn(8, 6).t()  # not contiguous where it lies
    rules = [
        StackExperts(r"experts\.(?P<expert>\d+)\.w", "experts.w"),
        SplitExperts("^stacked$", "stacked.{}"),
        Transpose(r"q\.weight$|turned"),
        AddPrefix("model."),
    ]
    sending = publisher(key_map=rules)
    for version in (1, 2):
        sending.publish(weights, version)
        found = all_of(transport)
        assert torch.equal(found["model.l.q.weight"], weights["l.q.weight"].t())
        assert torch.equal(found["model.l.turned.weight"], weights["l.turned.weight"].t())
        assert torch.equal(found["model.experts.w"], torch.stack([weights[f"experts.{n}.w"] for n in range(3)]))
        assert torch.equal(found["model.stacked.2"], weights["stacked"][2])
        for tensor in weights.values():
            tensor.add_(1)


def test_errors_of_key_maps_name_their_field(transport: Callable[[], Any], publisher: Any) -> None:
    for options, field, why in (
        ({"key_map": "hf"}, "key_map", "string"),
        ({"dtype": torch.int8}, "dtype", "Publisher: dtype"),
        ({"dtype": "bf16"}, "dtype", "Publisher: dtype"),
        ({"fp32_keys": "("}, "fp32_keys", "fp32_keys"),
        (
            {"fp32_keys": ["norm", "*norm*"]},
            "fp32_keys",
            r"Publisher: fp32_keys: expected regular expressions.*\*norm\*",
        ),
    ):
        with pytest.raises(ConfigError, match=why) as caught:
            publisher(**options)
        assert caught.value.field == field
    with pytest.raises(ConfigError, match="publish the model itself"):
        publisher(key_map=HFDefault()).publish(state(), 1)
    with pytest.raises(ConfigError, match="not mapped to anything"):
        publisher(key_map=lambda given: {"one": given["one"]}).publish(state(), 1)
    with pytest.raises(ConfigError, match="turns the order"):
        publisher(key_map=lambda given: {"w": given["w"].flip(0)}).publish({"w": torch.ones(3, 2)}, 1)


@pytest.mark.filterwarnings("ignore:.*beta state:UserWarning", "ignore:.*prototype stage:UserWarning")
@pytest.mark.parametrize("kind", ["to_sparse", "to_sparse_csr", "nested"])
def test_what_is_no_plain_tensor_any_more_is_refused_by_its_name(kind: str, publisher: Any) -> None:
    plain = torch.eye(2)
    strange = torch.nested.nested_tensor([plain[0], plain[1, :1]]) if kind == "nested" else getattr(plain, kind)()
    sending = publisher()
    sending.publish({"a": plain}, 1)
    with pytest.raises(ConfigError, match=r"^a: .* can't be stored"):
        sending.publish({"a": strange}, 2)
    sending.publish({"a": plain}, 3)


def test_a_map_that_scatters_elements_says_so(publisher: Any) -> None:
    weights = {"a": torch.ones(9000, 2), "b": torch.ones(9000, 2)}
    with pytest.raises(ConfigError, match="interleaves"):
        publisher(key_map=lambda given: {"ab": torch.stack([given["a"], given["b"]], 1).view(18000, 2)}).publish(
            weights, 1
        )


def test_a_tied_tensor_may_not_differ_by_its_dtype(transport: Callable[[], Any], publisher: Any) -> None:
    weight = torch.randn(4, 4)
    sending = publisher(dtype=torch.bfloat16)
    sending.publish({"embed": weight, "head": weight}, 1)
    tied = torch.zeros(4, 4, dtype=torch.bfloat16)
    with holdfast.sync.Receiver(transport()) as receiver:
        receiver.receive({"embed": tied, "head": tied}, timeout=TIMEOUT_S)
        assert torch.equal(tied, weight.bfloat16())
        sending.publish({"embed": weight, "head": weight + 1}, 2)
        with pytest.raises(StateMismatch, match="different values"):
            receiver.receive({"embed": tied, "head": tied}, timeout=TIMEOUT_S)
        assert torch.equal(tied, weight.bfloat16())


@pytest.mark.parametrize("rule", [False, True])
def test_fp8_is_what_an_export_writes(
    transport: Callable[[], Any], publisher: Any, tmp_path: Path, *, rule: bool
) -> None:
    torch.manual_seed(2)
    model = nn.ModuleDict({"q_proj": nn.Linear(200, 300), "up_proj": nn.Linear(130, 128), "norm": nn.LayerNorm(7)})
    options: dict[str, Any] = {"dtype": "float8_e4m3fn"}
    if rule:
        options = {"dtype": torch.bfloat16, "key_map": [Fp8(r"proj\.weight$", block=(64, 32))]}
    sending = publisher(**options)
    for version in (1, 2):
        holdfast.export_hf(model, tmp_path / f"hf-{version}", **options)
        sending.publish(model, version)
        found, expected = all_of(transport), load_file(tmp_path / f"hf-{version}" / "model.safetensors")
        assert_equal(found, expected)
        assert found["q_proj.weight"].dtype == torch.float8_e4m3fn
        assert found["q_proj.weight_scale_inv"].dtype == torch.float32
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)


def test_values_and_scales_go_together(transport: Callable[[], Any], publisher: Any) -> None:
    publisher(key_map=Fp8(r"weight$")).publish({"a.weight": torch.ones(4, 4), "b.weight": torch.ones(4, 4)}, 1)
    for include in ("*.weight", "*_inv"):
        with pytest.raises(ConfigError, match=r"without `a\.weight"):
            all_of(transport, include=include)
    assert all_of(transport, include="a.*").keys() == {"a.weight", "a.weight_scale_inv"}


def test_fp8_of_what_has_to_be_brought_to_the_host_in_pieces(transport: Callable[[], Any], publisher: Any) -> None:
    """A transposed matrix stands for one on a device: neither can be read where it lies."""
    values = torch.randn(1500, 1100) * torch.logspace(-3, 3, 1100)
    sending = publisher(key_map=[Fp8("w"), AddPrefix("m.")])
    sending.publish({"w": values}, 1)
    expected = all_of(transport)
    sending.publish({"w": values.t().contiguous().t()}, 2)
    assert_equal(all_of(transport), expected)


def test_fp8_of_nothing_is_an_error(publisher: Any) -> None:
    layer = nn.ModuleDict({"up_proj": nn.Linear(4, 4)})
    with pytest.raises(ConfigError, match="none to quantize"):
        publisher(dtype="float8_e4m3fn", fp32_keys=["up_proj"]).publish(layer, 1)


def test_another_dtype_is_refused_before_anything_changes(transport: Callable[[], Any], publisher: Any) -> None:
    publisher(dtype=torch.bfloat16).publish({"a": torch.ones(4), "b": torch.ones(4)}, 1)
    into = {"a": torch.zeros(4, dtype=torch.bfloat16), "b": torch.zeros(4)}
    with holdfast.sync.Receiver(transport()) as receiver, pytest.raises(StateMismatch, match="`b` is published as"):
        receiver.receive(into, timeout=TIMEOUT_S)
    assert not into["a"].any()


# Slices. ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streaming", [False, True])
def test_each_of_two_takes_its_slice(transport: Callable[[], Any], publisher: Any, *, streaming: bool) -> None:
    weights = {"rows": torch.randn(10, 6), "columns": torch.randn(5, 8), "whole": torch.randn(3)}
    sending = publisher(dtype=torch.bfloat16)
    receivers = [holdfast.sync.Receiver(transport()) for _ in range(2)]
    parts = [
        {
            "rows": holdfast.Shard(torch.zeros(5, 6, dtype=torch.bfloat16), (10, 6), (5 * half, 0)),
            "columns": holdfast.Shard(torch.zeros(5, 4, dtype=torch.bfloat16), (5, 8), (0, 4 * half)),
            "whole": torch.zeros(3, dtype=torch.bfloat16),
        }
        for half in range(2)
    ]
    for version in (1, 2):
        sending.publish(weights, version)
        for receiver, part in zip(receivers, parts, strict=True):
            assert receiver.receive(part, timeout=TIMEOUT_S, streaming=streaming) == version
        rows, columns = (
            torch.cat([part[name].tensor for part in parts], dim) for name, dim in (("rows", 0), ("columns", 1))
        )
        assert torch.equal(rows, weights["rows"].bfloat16())
        assert torch.equal(columns, weights["columns"].bfloat16())
        assert torch.equal(parts[1]["whole"], weights["whole"].bfloat16())
        for tensor in weights.values():
            tensor.mul_(-1)
    for receiver in receivers:
        receiver.close()


def test_a_slice_that_moves_gets_its_new_place(transport: Callable[[], Any], publisher: Any) -> None:
    whole, part = torch.randn(8, 2), torch.zeros(4, 2, dtype=torch.bfloat16)
    sending = publisher(delta=True, dtype=torch.bfloat16)
    with holdfast.sync.Receiver(transport()) as receiver:
        for version, start in ((1, 0), (2, 4), (3, 2)):
            sending.publish({"w": whole}, version)
            receiver.receive({"w": holdfast.Shard(part, (8, 2), (start, 0))}, timeout=TIMEOUT_S)
            assert torch.equal(part, whole[start : start + 4].bfloat16()), version


def test_a_slice_of_another_whole_is_a_mismatch(transport: Callable[[], Any], publisher: Any) -> None:
    publisher().publish({"w": torch.ones(8, 2)}, 1)
    part = torch.zeros(4, 2)
    with holdfast.sync.Receiver(transport()) as receiver, pytest.raises(StateMismatch, match=r"\[8, 2\].*\[12, 2\]"):
        receiver.receive({"w": holdfast.Shard(part, (12, 2), (4, 0))}, timeout=TIMEOUT_S)
    assert not part.any()


def test_parts_are_published_as_one_tensor(transport: Callable[[], Any], publisher: Any) -> None:
    part = torch.randn(8, 2)
    publisher(dtype=torch.bfloat16, key_map=[Rename("w", "x"), Transpose("x")]).publish(
        {"w": holdfast.Shard(part, (8, 2), (0, 0))}, 1
    )
    assert_equal(all_of(transport), {"x": part.t().bfloat16()})


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
def test_a_peft_adapter_goes_to_a_worker_with_the_same_adapter(
    transport: Callable[[], Any], publisher: Any, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    config = {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    trained, served = (peft.get_peft_model(tiny("llama", seed=seed), peft.LoraConfig(**config)) for seed in (1, 2))
    before = {name: value.clone() for name, value in served.state_dict().items()}
    publisher(include="*.lora_*").publish(trained, 1)
    with holdfast.sync.Receiver(transport(), include="*.lora_*") as receiver:
        receiver.receive(served, timeout=TIMEOUT_S)
    adapters = 0
    for name, value in served.state_dict().items():
        adapters += "lora" in name
        assert torch.equal(value, trained.state_dict()[name] if "lora" in name else before[name]), name
    assert adapters == 8
    trained.save_pretrained(tmp_path / "adapter")
    publisher(key_map=HFDefault()).publish(trained, 2)
    assert_equal(all_of(transport), load_file(tmp_path / "adapter" / "adapter_model.safetensors"))


def test_names_are_chosen_after_the_key_map(transport: Callable[[], Any], publisher: Any) -> None:
    model = tiny("qwen3_moe", seed=1)
    publisher(
        key_map=HFDefault(), dtype="float8_e4m3fn", include=["model.layers.0", "lm_head"], exclude="*.[kv]_proj.*"
    ).publish(model, 1)
    found = all_of(transport)
    assert "model.layers.0.mlp.experts.4.up_proj.weight_scale_inv" in found, "scales go with their values"
    assert {name.rpartition(".")[0] for name in found if "layers.0.self_attn" in name} == {
        f"model.layers.0.self_attn.{name}" for name in ("q_proj", "o_proj", "q_norm", "k_norm")
    }
    assert all(name.startswith("model.layers.0.") or name == "lm_head.weight" for name in found)
    with pytest.raises(ConfigError, match="matches nothing"):
        publisher(key_map=HFDefault(), include="model.layers.0.mlp.experts.gate_up_proj").publish(model, 2)


def test_converted_weights_and_slices_on_an_object_store(object_server: Server) -> None:
    def store() -> holdfast.sync.DirectoryTransport:
        place = f"s3://{bucket}/versions"
        return holdfast.sync.DirectoryTransport(place, store_options=object_server.options)

    bucket, weights = object_server.bucket(), {"a": torch.randn(70, 6), "b": torch.randn(70, 6)}
    with holdfast.sync.Publisher(
        store(), key_map=lambda given: {"ab": torch.cat([*given.values()])}, dtype="bfloat16"
    ) as one:
        one.publish(weights, 1, timeout=TIMEOUT_S)
    part = torch.zeros(40, 3, dtype=torch.bfloat16)
    with holdfast.sync.Receiver(store(), include="ab") as receiver:
        receiver.receive({"ab": holdfast.Shard(part, (140, 6), (50, 3))}, timeout=TIMEOUT_S)
    assert torch.equal(part, torch.cat([*weights.values()])[50:90, 3:].bfloat16())
