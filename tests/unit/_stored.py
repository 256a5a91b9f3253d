"""A checkpoint in a dictionary: what a state would have stored on one rank, without any file."""

from __future__ import annotations

import copy
from typing import Any

import torch

from holdfast.format.structure import name_on_rank, path_on_rank
from holdfast.state.entries import local_tensor
from holdfast.state.load_plan import Loading, StoredInfo
from holdfast.state.tree import StateTree


class Stored:
    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.objects: dict[str, Any] = {}
        self.paths: dict[str, tuple[str | int, ...]] = {}

    def save(self, tree: StateTree) -> Stored:
        collected = tree.collect()
        for entry in collected.tensors:
            name = name_on_rank(entry.path, tree.rank)
            self.tensors[name] = local_tensor(entry.tensor).clone()
            self.paths[name] = path_on_rank(entry.path, tree.rank)
        for item in collected.objects:
            name = name_on_rank(item.path, tree.rank)
            self.objects[name] = copy.deepcopy(item.value)
            self.paths[name] = path_on_rank(item.path, tree.rank)
        return self

    @classmethod
    def of_stock(cls, state_dict: dict[str, Any]) -> Stored:
        """What stock ``dcp.save(state_dict)`` would store."""
        from torch.distributed.checkpoint._nested_dict import flatten_state_dict

        flat, paths = flatten_state_dict(state_dict)
        stored = cls()
        for name, value in flat.items():
            (stored.tensors if isinstance(value, torch.Tensor) else stored.objects)[name] = copy.deepcopy(value)
        stored.paths = dict(paths)
        return stored

    @property
    def names(self) -> set[str]:
        return {*self.tensors, *self.objects}

    def plan(self, tree: StateTree, **options: Any) -> Loading:
        infos = {
            name: StoredInfo(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in self.tensors.items()
        }
        return tree.destinations(infos, self.objects.keys(), self.paths, **options)

    def load(self, tree: StateTree, **options: Any) -> Loading:
        loading = self.plan(tree, **options)
        with torch.no_grad():
            for destination in loading.tensors:
                local_tensor(destination.tensor).copy_(self.tensors[destination.name])
        loading.finish({name: copy.deepcopy(self.objects[name]) for name in loading.objects})
        return loading


def one_rank(state: dict[str, Any], **options: Any) -> StateTree:
    return StateTree(state, **{"rank": 0, "world": 1, "group_ranks": None, "auto_rng": False, **options})


def assert_fits(loading: Loading) -> None:
    assert (loading.missing, loading.unexpected, loading.mismatched) == ((), (), ())
