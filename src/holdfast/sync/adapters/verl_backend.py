"""Register the engine with verl on import, for its ``custom_backend_module``. See ``adapters.verl``."""

from __future__ import annotations

from holdfast.sync.adapters.verl import register

ENGINE = register()
