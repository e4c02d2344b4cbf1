"""How far hypothesis searches. The nightly run searches further: HYPOTHESIS_PROFILE=nightly."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("default", max_examples=25, deadline=None)
settings.register_profile("nightly", max_examples=300, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
