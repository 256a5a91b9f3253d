"""What every test shares: how hypothesis draws."""

from __future__ import annotations

import os

from hypothesis import settings

# In CI the same examples each time, so that a red run is the change's doing; elsewhere new ones, to find more.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("local", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "local")
