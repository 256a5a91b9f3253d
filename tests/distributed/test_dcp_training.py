"""Models and optimizers of every parallelism, saved by one and loaded by the same or another; training that goes on.

In every combination of stock DCP and Holdfast (`dcp_ways`). Stock users pass what ``get_state_dict`` gives; Holdfast's
own save and load get modules and optimizers, and have to use the same names.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dcp_ways import FIVE, OWN, Behaviours, Way, equal
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from worlds import mesh_of

behaviours = Behaviours()

Optimize = Callable[[Any], torch.optim.Optimizer]
adamw: Optimize = partial(torch.optim.AdamW, lr=0.05)


class Net(nn.Module):
    """Uneven sizes, a buffer that training changes, one that is not kept, and what a module keeps beside tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)
        self.head = nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.notes = {"rounds": 0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.head(x + self.down(self.up(self.norm(x)).relu()))

    def get_extra_state(self) -> dict[str, int]:
        return dict(self.notes)

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.notes = dict(state)


# parallelism -----------------------------------------------------------------------------------------------------


def single(model: Any) -> Any:
    return model


def fsdp(model: Any, mesh: Any = None) -> Any:
    mesh = mesh if mesh is not None else mesh_of(dist.get_world_size())
    for layer in (model.up, model.down):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def hsdp(model: Any) -> Any:
    return fsdp(model, mesh_of(2, 2, names=("replicate", "shard")))


def tp(model: Any, mesh: Any = None) -> Any:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(model, mesh if mesh is not None else mesh_of(dist.get_world_size()), plan)


def fsdp_tp(model: Any) -> Any:
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    return fsdp(tp(model, mesh["tp"]), mesh["dp"])


def ddp(model: Any) -> Any:
    return DistributedDataParallel(model)


def made(how: Callable[[Any], Any], seed: int, optimize: Optimize = adamw, build: Callable[[], Any] = Net) -> Any:
    torch.manual_seed(seed)
    model = how(build())
    return model, optimize(model.parameters())


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int, start: int = 0) -> None:
    for step in range(start, start + steps):
        model(torch.sin(torch.arange(24.0) + step).reshape(4, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def held(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state as stock sees it: copied, so that training changes nothing of it."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return copy.deepcopy({"model": model_state, "optimizer": optimizer_state})


def whole(value: Any) -> Any:
    """The same with whole tensors for DTensors."""
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):  # a full state has lists for tuples
        return [whole(item) for item in value]
    return value.full_tensor() if isinstance(value, DTensor) else value


def save_training(way: Way, model: Any, optimizer: torch.optim.Optimizer, **more: Any) -> None:
    """As stock's users and Holdfast's each do it."""
    if way.writer == OWN:
        way.save({"model": model, "optimizer": optimizer, **more})
    else:
        way.save({**held(model, optimizer), **more})


def load_training(way: Way, model: Any, optimizer: torch.optim.Optimizer, **more: Any) -> dict[str, Any]:
    """Returns what ``more`` has become."""
    if way.reader == OWN:
        state = {"model": model, "optimizer": optimizer, **more}
        way.load(state)
    else:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state, **more}
        way.load(state)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return {key: state[key] for key in more}


def goes_on(
    way: Way,
    save_as: Callable[[Any], Any],
    load_as: Callable[[Any], Any],
    optimize: Optimize = adamw,
    build: Callable[[], Any] = Net,
) -> None:
    """Train, save; load into a new model; both hold the same, and do after another step."""
    model, optimizer = made(save_as, 1, optimize, build)
    train(model, optimizer, 2)
    save_training(way, model, optimizer, step=2, name="run")
    fresh, fresh_optimizer = made(load_as, 2, optimize, build)
    found = load_training(way, fresh, fresh_optimizer, step=0, name="")
    assert found == {"step": 2, "name": "run"}
    equal(whole(held(fresh, fresh_optimizer)), whole(held(model, optimizer)))
    if save_as is load_as:
        train(model, optimizer, 2, start=2)
        train(fresh, fresh_optimizer, 2, start=2)
        equal(held(fresh, fresh_optimizer), held(model, optimizer))


for how in (fsdp, hsdp, tp, fsdp_tp, ddp):
    behaviours(world=4, name=f"{how.__name__}_goes_on")(partial(goes_on, save_as=how, load_as=how))
for pair in ((fsdp, tp), (tp, hsdp), (fsdp_tp, fsdp), (hsdp, fsdp_tp), (ddp, fsdp), (fsdp_tp, ddp)):
    name = f"{pair[0].__name__}_is_loaded_as_{pair[1].__name__}"
    behaviours(world=4, name=name)(partial(goes_on, save_as=pair[0], load_as=pair[1]))
behaviours(world=1, name="one_process_goes_on")(partial(goes_on, save_as=single, load_as=single))


# optimizers ------------------------------------------------------------------------------------------------------


def grouped(params: Any) -> torch.optim.Optimizer:
    """Groups with options of their own, one of them without parameters that were trained."""
    params = list(params)
    return torch.optim.Adam([{"params": params[:3], "lr": 0.01, "betas": (0.5, 0.9)}, {"params": params[3:]}], lr=0.1)


OPTIMIZERS: dict[str, Optimize] = {
    "sgd_without_state": partial(torch.optim.SGD, lr=0.1),
    "sgd_with_momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adam_with_amsgrad": partial(torch.optim.Adam, lr=0.1, amsgrad=True),
    "adamw_by_loops": partial(torch.optim.AdamW, lr=0.1, foreach=False),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.1, momentum=0.9, centered=True),
    "adam_with_groups": grouped,
}
for kind, optimize in OPTIMIZERS.items():
    behaviours(world=2, combinations=FIVE, name=kind)(partial(goes_on, save_as=fsdp, load_as=fsdp, optimize=optimize))


@behaviours(world=2)
def schedulers(way: Way) -> None:
    def parts(seed: int) -> Any:
        model, optimizer = made(fsdp, seed)
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        return model, optimizer, torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], [3])

    model, optimizer, schedule = parts(1)
    for step in range(5):
        train(model, optimizer, 1, start=step)
        schedule.step()
    fresh, fresh_optimizer, fresh_schedule = parts(2)
    if way.writer == OWN:
        save_training(way, model, optimizer, schedule=schedule)
    else:
        # The schedulers inside say nothing of each rank's own: one for all.
        save_training(way, model, optimizer, schedule=schedule.state_dict())
    found = load_training(
        way, fresh, fresh_optimizer, schedule=fresh_schedule if way.reader == OWN else fresh_schedule.state_dict()
    )
    if way.reader != OWN:
        fresh_schedule.load_state_dict(found["schedule"])
    assert fresh_schedule.state_dict() == schedule.state_dict()
    schedule.step()
    fresh_schedule.step()
    assert fresh_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


class Half(Net):
    """One layer is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.up.requires_grad_(False)


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(6, 8, bias=False)
        self.again.weight = self.up.weight


class Wrapped(Net):
    def __init__(self) -> None:
        super().__init__()
        self.down = checkpoint_wrapper(self.down)


behaviours(world=2, combinations=FIVE, name="tied_parameters")(
    partial(goes_on, save_as=single, load_as=single, build=Tied)
)
behaviours(world=2, combinations=FIVE, name="activation_checkpoints")(
    partial(goes_on, save_as=fsdp, load_as=fsdp, build=Wrapped)
)
behaviours(world=2, combinations=FIVE, name="frozen_parameters")(
    partial(
        goes_on,
        save_as=fsdp,
        load_as=fsdp,
        build=Half,
        optimize=lambda params: adamw([param for param in params if param.requires_grad]),
    )
)


@behaviours(world=2, combinations=FIVE)
def lower_precision_than_the_parameters(way: Way) -> None:
    """FSDP2 that computes in bfloat16: what is saved are the float32 shards."""

    def mixed(model: Any) -> Any:
        return fully_shard(model, mesh=mesh_of(2), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))

    goes_on(way, mixed, mixed)


def fsdp1(model: Any, mesh: Any = None) -> Any:
    """The first generation: flat parameters, and hooks that cut the state into pieces again."""
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"), device_mesh=mesh)


@behaviours(world=2, own=False)
def the_first_fsdp(way: Way) -> None:
    """With a mesh its state has DTensors, without one ShardedTensors, which are loaded into what else there is."""
    models = {"mesh": lambda model: fsdp1(model, mesh_of(2)), "group": fsdp1}
    for name, how in models.items():
        model, optimizer = made(how, 1)
        train(model, optimizer, 2)
        way.save(dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)), name)
        expected = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
        for other in (how, fsdp):
            fresh, fresh_optimizer = made(other, 2)
            found, found_optimizer = get_state_dict(fresh, fresh_optimizer)
            way.load({"model": found, "optimizer": found_optimizer}, name)
            set_state_dict(fresh, fresh_optimizer, model_state_dict=found, optim_state_dict=found_optimizer)
            full = get_state_dict(fresh, fresh_optimizer, options=StateDictOptions(full_state_dict=True))
            equal(
                whole({"model": full[0], "optimizer": full[1]}), whole({"model": expected[0], "optimizer": expected[1]})
            )


@behaviours(world=2, combinations=FIVE)
def compiled_modules(way: Way) -> None:
    """The wrapper of ``torch.compile`` is not in the names; nothing is compiled here."""
    compiled, optimizer = made(lambda model: torch.compile(model, backend="eager"), 1)
    train(compiled._orig_mod, optimizer, 2)
    save_training(way, compiled, optimizer)
    plain, plain_optimizer = made(single, 2)
    load_training(way, plain, plain_optimizer)
    equal(held(plain, plain_optimizer), held(compiled, optimizer))


@behaviours(world=2, combinations=FIVE)
def modules_made_on_the_meta_device(way: Way) -> None:
    model, optimizer = made(fsdp, 1)
    train(model, optimizer, 2)
    save_training(way, model, optimizer)
    with torch.device("meta"):
        fresh = fsdp(Net())
    fresh.to_empty(device="cpu")
    load_training(way, fresh, adamw(fresh.parameters()))
    equal(get_model_state_dict(fresh), get_model_state_dict(model))


# objects that hold several of them -----------------------------------------------------------------------------


class App:
    """Model and optimizer in one object with ``state_dict`` and ``load_state_dict``: how DCP's tutorial does it."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        self.model, self.optimizer, self.rounds = model, optimizer, 0

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer, "rounds": self.rounds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rounds = state["rounds"]
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


@behaviours(world=4)
def one_object_for_all_of_an_application(way: Way) -> None:
    app, fresh = App(*made(fsdp_tp, 1)), App(*made(fsdp_tp, 2))
    train(app.model, app.optimizer, 2)
    app.rounds = 2
    way.save({"app": app})
    way.load({"app": fresh})
    assert fresh.rounds == 2
    equal(held(fresh.model, fresh.optimizer), held(app.model, app.optimizer))


@behaviours(world=2)
def objects_whose_load_talks_to_other_ranks(way: Way) -> None:
    """Ranks name them in different orders; DCP loads them in the same one."""
    calls: list[str] = []

    class Talks:
        def __init__(self, name: str) -> None:
            self.name = name

        def state_dict(self) -> dict[str, Any]:
            return {"name": self.name}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            told: list[Any] = [None, None]
            dist.all_gather_object(told, state["name"])
            assert told == [self.name] * 2
            calls.append(self.name)

    names = ["a", "b", "c"] if dist.get_rank() == 0 else ["c", "a", "b"]
    way.save({name: Talks(name) for name in names})
    way.load({name: Talks(name) for name in names})
    assert sorted(calls) == ["a", "b", "c"]


# parts that only some ranks have ---------------------------------------------------------------------------------


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): nn.Linear(6, 6) for number in range(4)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def stages(model: Stack, *numbers: int) -> Stack:
    """What is left of ``model`` on the rank that has these of its layers."""
    kept = {str(number): model.layers[str(number)] for number in numbers}
    model.layers = nn.ModuleDict(kept)
    return model


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def flat_state(model: Any, optimizer: Any) -> dict[str, Any]:
    """With a pipeline the groups of optimizers differ from rank to rank, and options have to have names, too."""
    model_state, optimizer_state = get_state_dict(model, optimizer, options=FLAT)
    return {"model": model_state, "optimizer": optimizer_state}


@behaviours(world=4)
def stages_of_a_pipeline(way: Way) -> None:
    """One layer a rank, loaded by one with two of them, by FSDP2, and from FSDP2."""
    rank = dist.get_rank()
    whole_model, whole_optimizer = made(fsdp_stack, 1, build=Stack)
    train(whole_model, whole_optimizer, 2)
    expected = whole(flat_state(whole_model, whole_optimizer))
    stage, stage_optimizer = made(lambda model: stages(model, rank), 1, build=Stack)
    mine = flat_state(stage, stage_optimizer)
    way.save(flat_state(whole_model, whole_optimizer), "whole")
    way.load(mine, "whole", partial=True)
    equal(whole(mine), {part: {name: expected[part][name] for name in mine[part]} for part in mine})

    way.save(mine, "stages")
    fresh, fresh_optimizer = made(fsdp_stack, 2, build=Stack)
    state = flat_state(fresh, fresh_optimizer)
    way.load(state, "stages")
    equal(whole(state), expected)
    two, two_optimizer = made(lambda model: stages(model, rank // 2, rank // 2 + 2), 2, build=Stack)
    pair = flat_state(two, two_optimizer)
    way.load(pair, "stages", partial=True)
    equal(whole(pair), {part: {name: expected[part][name] for name in pair[part]} for part in pair})


def fsdp_stack(model: Any) -> Any:
    return fully_shard(model, mesh=mesh_of(4))


@behaviours(world=4)
def experts_of_some_ranks(way: Way) -> None:
    """Two experts; each is sharded over a mesh of the two ranks that have it, all else over the mesh of four."""
    mesh = mesh_of(2, 2, names=("dp", "ep"))
    expert = dist.get_rank() % 2

    def parallel(model: Any) -> Any:
        fully_shard(stages(model[1], expert).layers[str(expert)], mesh=mesh["dp"])
        return fully_shard(model, mesh=mesh_of(4), ignored_params=set(model[1].parameters()))

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), Stack(), nn.Linear(6, 6))

    model, optimizer = made(parallel, 1, build=build)
    train(model, optimizer, 2)
    state = copy.deepcopy(flat_state(model, optimizer))
    way.save(state)
    fresh = flat_state(*made(parallel, 2, build=build))
    way.load(fresh)
    equal(fresh, state)


@behaviours(world=2)
def fine_tuning(way: Way) -> None:
    """A pretrained model becomes part of another one, which saves what it trains only, and is resumed from both."""

    class Tuned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = Net().requires_grad_(False)
            self.top = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.top(self.base(x))

    def whole_fsdp(model: Any) -> Any:
        return fully_shard(model, mesh=mesh_of(2))

    base, base_optimizer = made(fsdp, 1)
    train(base, base_optimizer, 2)
    way.save(held(base, base_optimizer), "base")

    def load_base(model: Any) -> None:
        options = StateDictOptions(keep_submodule_prefixes=False)
        part = get_model_state_dict(model, submodules={model.base}, options=options)
        way.load({"model": part}, "base")
        set_model_state_dict(
            model, {f"base.{name}": value for name, value in part.items()}, options=StateDictOptions(strict=False)
        )
        equal(whole(get_model_state_dict(model.base)), whole(get_model_state_dict(base)))

    trained = StateDictOptions(ignore_frozen_params=True)

    def top_of(model: Any, optimizer: Any) -> dict[str, Any]:
        model_state, optimizer_state = get_state_dict(model, optimizer, options=trained)
        return {
            "model": {name: value for name, value in model_state.items() if name.startswith("top.")},
            "optimizer": optimizer_state,
        }

    model, optimizer = made(whole_fsdp, 3, lambda params: adamw([p for p in params if p.requires_grad]), Tuned)
    load_base(model)
    train(model, optimizer, 2)
    way.save(copy.deepcopy(top_of(model, optimizer)), "tuned")

    fresh, fresh_optimizer = made(whole_fsdp, 4, lambda params: adamw([p for p in params if p.requires_grad]), Tuned)
    load_base(fresh)
    state = top_of(fresh, fresh_optimizer)
    way.load(state, "tuned")
    set_model_state_dict(fresh, state["model"], options=StateDictOptions(strict=False))
    set_optimizer_state_dict(fresh, fresh_optimizer, state["optimizer"], options=trained)
    equal(top_of(fresh, fresh_optimizer), top_of(model, optimizer))


# other forms of a state dictionary -------------------------------------------------------------------------------


@behaviours(world=4)
def flattened_optimizer_state(way: Way) -> None:
    model, optimizer = made(fsdp_tp, 1)
    train(model, optimizer, 2)
    way.save(copy.deepcopy(flat_state(model, optimizer)))
    fresh, fresh_optimizer = made(fsdp, 2)
    state = flat_state(fresh, fresh_optimizer)
    way.load(state)
    set_state_dict(
        fresh, fresh_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=FLAT
    )
    equal(whole(held(fresh, fresh_optimizer)), whole(held(model, optimizer)))


@behaviours(world=2)
def full_state(way: Way) -> None:
    """Every rank gathers all of it, and saves and loads what are replicas then."""
    options = StateDictOptions(full_state_dict=True)
    model, optimizer = made(fsdp, 1)
    train(model, optimizer, 2)
    saved, saved_optimizer = get_state_dict(model, optimizer, options=options)
    way.save({"model": saved, "optimizer": saved_optimizer})
    fresh, fresh_optimizer = made(fsdp, 2)
    found, found_optimizer = get_state_dict(fresh, fresh_optimizer, options=options)
    state = {"model": found, "optimizer": found_optimizer}
    way.load(state)
    set_state_dict(
        fresh, fresh_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=options
    )
    equal(whole(held(fresh, fresh_optimizer)), whole(held(model, optimizer)))


@behaviours(world=2, own=False)
def full_state_of_the_first_rank(way: Way) -> None:
    """Gathered, saved, and loaded by rank 0 alone, and broadcast to the shards of the others."""
    offload = StateDictOptions(full_state_dict=True, cpu_offload=True)
    broadcast = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    model, optimizer = made(fsdp, 1)
    train(model, optimizer, 2)
    saved, saved_optimizer = get_state_dict(model, optimizer, options=offload)
    fresh, fresh_optimizer = made(fsdp, 2)
    found, found_optimizer = get_state_dict(fresh, fresh_optimizer, options=offload)
    state = {"model": found, "optimizer": found_optimizer}
    if dist.get_rank() == 0:
        way.save({"model": saved, "optimizer": saved_optimizer}, no_dist=True)
        way.load(state, no_dist=True)
    dist.barrier()
    set_model_state_dict(fresh, state["model"], options=broadcast)
    set_optimizer_state_dict(fresh, fresh_optimizer, state["optimizer"], options=broadcast)
    equal(whole(held(fresh, fresh_optimizer)), whole(held(model, optimizer)))


@behaviours(world=2)
def weights_without_the_optimizer(way: Way) -> None:
    """Of a checkpoint with both; and one that has less than the model, which keeps the rest."""
    model, optimizer = made(fsdp, 1)
    train(model, optimizer, 2)
    way.save(held(model, optimizer))
    fresh, _ = made(fsdp, 2)
    state = {"model": get_model_state_dict(fresh)}
    way.load(state)
    set_model_state_dict(fresh, state["model"])
    equal(whole(get_model_state_dict(fresh)), whole(get_model_state_dict(model)))

    other, _ = made(fsdp, 3)
    before = copy.deepcopy(get_model_state_dict(other))
    part = {name: value for name, value in get_model_state_dict(other).items() if name.startswith("up.")}
    way.load({"model": part}, partial=True)
    set_model_state_dict(other, part, options=StateDictOptions(strict=False))
    after, saved = get_model_state_dict(other), get_model_state_dict(model)
    equal(after, {name: saved[name] if name in part else before[name] for name in after})


@behaviours(world=2)
def the_optimizer_without_weights(way: Way) -> None:
    model, optimizer = made(fsdp, 1)
    train(model, optimizer, 2)
    way.save(held(model, optimizer))
    fresh, fresh_optimizer = made(fsdp, 2)
    state = {"optimizer": get_optimizer_state_dict(fresh, fresh_optimizer)}
    way.load(state)
    set_optimizer_state_dict(fresh, fresh_optimizer, state["optimizer"])
    equal(held(fresh, fresh_optimizer)["optimizer"], held(model, optimizer)["optimizer"])


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return behaviours.outcomes(request, tmp_path_factory.mktemp("training"))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@behaviours.every_case()
def test_training(case: Any, outcomes: Any) -> None:
    behaviours.check(case, outcomes)
