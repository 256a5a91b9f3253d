"""Every field of `CheckpointConfig`, `Keep` and `Best`: defaults, bounds, and an error that names the field."""

from __future__ import annotations

import dataclasses
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.catalog.retention import Best, Keep
from holdfast.config import CheckpointConfig
from holdfast.errors import ConfigError

DEFAULTS: dict[str, Any] = {
    "every": 500,
    "keep": Keep(last=3),
    "mode": "async",
    "staging": "lazy",
    "first_step": False,
    "last_model_only": False,
    "last_dtype": None,
    "load_model_only": False,
    "exclude_from_loading": (),
    "initial_load_path": None,
    "initial_key_map": None,
    "load_step": None,
    "load_only": False,
    "name_template": "step-{step}",
    "in_flight": 2,
    "when_busy": "wait",
    "on_error": "raise",
    "on_corrupt": "fallback",
    "on_suspicious": "warn",
    "mirror_keep": None,
    "mirror_backlog": 8,
    "mirror_timeout": 21600.0,
    "save_on_signal": (),
    "signal_timeout": 600.0,
    "stage_timeout": 600.0,
    "persist_timeout": 1800.0,
    "commit_timeout": 600.0,
    "writers": 2,
    "io_limit_bytes_per_s": None,
    "nice": 10,
    "io_class": "none",
    "io_level": None,
    "host_writers": None,
    "cores": "auto",
}

SWITCHES = ("first_step", "last_model_only", "load_model_only", "load_only")
TIMEOUTS = ("stage_timeout", "persist_timeout", "commit_timeout", "signal_timeout")


def each(name: str, *values: Any) -> list[tuple[str, Any]]:
    return [(name, value) for value in values]


BAD: list[tuple[str, Any]] = [
    *each("every", 0, -1, 1.5, "500", True),
    *each("keep", 3, {"last": 3}, Best("loss")),
    *each("mode", "Async", "disabled", None, 1),
    *each("staging", "pinned", None, []),
    *[case for name in SWITCHES for case in each(name, 1, "no", None)],
    *each("last_dtype", "bf16", "int8", torch.int64, torch.complex64, 16, "bool", []),
    *each("last_dtype", "float4_e2m1fn_x2", "float8_e8m0fnu"),
    *each("exclude_from_loading", "dataloader", [1], 3, None, {"a": 1}.values),
    *each("initial_load_path", "", 3, b"path", "ftp://host/x", "s3://bucket//x"),
    *each("load_step", -2, 1.0, "5", False),
    *each("name_template", "step", "{step}/x", ".step-{step}", "{a}-{step}", "{step}{step}", "{}", "{step", 7),
    *each("name_template", "{step!r}/", "a{step}\0", "{step.real}", "{step:x}", "{step:,}", "{step:.1f}"),
    *each("name_template", "{step[0]}", "{step:c}", "\udcff-{step}"),
    *each("in_flight", 0, 5, 1.0, None, True),
    *each("when_busy", "drop", None),
    *each("on_error", "ignore", None),
    *each("on_corrupt", "skip", None),
    *each("on_suspicious", "fail", None, True),
    *each("save_on_signal", True, None, 0, 65, -1, 15.0, "SIGNOTHING", "SIG_DFL", "sigterm", ["SIGTERM", None]),
    *each("save_on_signal", "SIGKILL", signal.SIGSTOP, (signal.SIGTERM, "SEGV"), "SIGCHLD", "SIGTSTP", "SIGPIPE"),
    *[case for name in TIMEOUTS for case in each(name, 0, -1.0, float("inf"), float("nan"), "9", None, True)],
    *each("writers", 0, 17, None),
    *each("io_limit_bytes_per_s", 0, (1 << 20) - 1, 1e9),
    *each("nice", -1, 20, None),
    *each("io_class", "realtime", None, [], 2),
    *each("io_level", 3),
    *each("host_writers", 0, 65, True, 1.0),
    *each("cores", "near", "0", 0, None, [], (), [-1], [8192], [True], ["0"], [0.0], iter([0])),
]  # fmt: skip

GOOD: list[tuple[str, Any]] = [
    *each("every", 1, None, 10**9),
    *each("keep", None, Keep(last=1), Keep(last=None)),
    *each("last_dtype", "float8_e4m3fn", "bfloat16", "torch.float16", torch.float32, torch.float64),
    *each("exclude_from_loading", ["a"], ("a", "b"), {"a"}, iter(["a"]), ()),
    *each("initial_load_path", "some/where", Path("some/where")),
    *each("load_step", -1, 0, 7),
    *each("name_template", "{step}", "checkpoint_{step:08d}", "step {step}", "Schritt-{step}-ü"),
    *each("io_limit_bytes_per_s", 1 << 20, None),
    *each("io_class", "idle", "best_effort"),
    *each("host_writers", 1, 64, None),
    *each("cores", "auto", "any", [0], (0, 8191), range(4), {3, 1}),
]


def test_the_defaults_are_the_documented_ones() -> None:
    assert {
        field.name: getattr(CheckpointConfig(), field.name) for field in dataclasses.fields(CheckpointConfig)
    } == DEFAULTS


def test_every_field_is_explained() -> None:
    assert CheckpointConfig.__doc__ is not None
    assert [name for name in DEFAULTS if name not in CheckpointConfig.__doc__] == []


@pytest.mark.parametrize(("name", "value"), BAD, ids=repr)
def test_a_value_out_of_range_names_its_field_and_what_was_expected(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^(CheckpointConfig\.)?{name}: expected .* found ") as caught:
        CheckpointConfig(**{name: value})
    assert caught.value.field == name


@pytest.mark.parametrize(("name", "value"), GOOD, ids=repr)
def test_a_value_in_range_is_taken(name: str, value: Any) -> None:
    CheckpointConfig(**{name: value})


def test_it_is_frozen_picklable_and_comparable() -> None:
    config = CheckpointConfig(every=7, last_dtype=torch.bfloat16, exclude_from_loading=["dataloader"])  # type: ignore[arg-type]
    assert (config.last_dtype, config.exclude_from_loading) == ("bfloat16", ("dataloader",))
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.every = 8  # type: ignore[misc]
    assert dataclasses.replace(config, every=8).every == 8


def test_a_path_may_be_a_path_object() -> None:
    assert CheckpointConfig(initial_load_path=Path("a") / "b").initial_load_path == "a/b"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("last", -1),
        ("last", 1.0),
        ("last", True),
        ("every", 0),
        ("minutes", 0),
        ("minutes", float("nan")),
        ("best", "loss"),
    ],
)
def test_keep_is_checked_too(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"Keep.{name}") as caught:
        Keep(**{name: value})
    assert caught.value.field == name


@pytest.mark.parametrize(
    "options", [{"metric": ""}, {"metric": 1}, {"metric": "a", "mode": "least"}, {"metric": "a", "n": 0}]
)
def test_best_is_checked_too(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="Best"):
        Best(**options)
