"""Register the engine with verl as ``delta_sharded``, in place of verl's own, for its ``custom_backend_module``.

    actor_rollout_ref.rollout.checkpoint_engine:
      backend: delta_sharded
      custom_backend_module: holdfast.sync.adapters.verl_delta_backend
      engine_kwargs: {delta_sharded: {place: /dev/shm/run-7, cache: true, delta: sparse}}

By that name verl configures its rollout servers for deltas. See ``adapters.verl``.
"""

from __future__ import annotations

from holdfast.sync.adapters.verl import register

ENGINE = register("delta_sharded")
