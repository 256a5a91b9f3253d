"""Importing this registers the engine with verl: what its ``custom_backend_module`` names. See ``adapters.verl``."""

from __future__ import annotations

from holdfast.sync.adapters.verl import register

ENGINE = register()
