"""What tests of exports on object stores share: the environment that leads to a server, and a copy of what is there."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from safetensors import safe_open

INDEX = "model.safetensors.index.json"


def environment(endpoint: str) -> dict[str, str]:
    """The variables by which every process of a job finds the store."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "somebody",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }


def downloaded(url: str, directory: Path) -> Path:
    """Every object below ``url`` as a file below ``directory``, as ``aws s3 sync`` would have it."""
    import obstore
    from obstore.store import from_url

    store = from_url(url, client_options={"allow_http": True})
    for rows in obstore.list(store):
        for row in rows:
            path = directory / row["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(obstore.get(store, row["path"]).bytes()))
    return directory


def as_vllm_reads(directory: Path) -> dict[str, torch.Tensor]:
    """The tensors of all ``*.safetensors`` that the index, if there is one, names; none may come twice."""
    files = sorted(path.name for path in directory.glob("*.safetensors"))
    if (directory / INDEX).exists():
        named = set(json.loads((directory / INDEX).read_text())["weight_map"].values())
        files = [name for name in files if name in named]
    found: dict[str, torch.Tensor] = {}
    for name in files:
        with safe_open(directory / name, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - it is no mapping
                assert key not in found, f"{key} is in {name} and in another file"
                found[key] = file.get_tensor(key)
    return found


def set_environment(endpoint: str) -> None:
    """Set `environment` for this process."""
    os.environ.update(environment(endpoint))
