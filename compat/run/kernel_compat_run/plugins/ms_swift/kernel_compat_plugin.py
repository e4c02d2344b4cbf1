"""Applies the settings of the environment variable or of the file in the working directory, in each process of ms-swift."""

from __future__ import annotations

import os

from kernel_compat_run.sources import VARIABLE, resolve
from kernel_compat_run.start import ending, start

with ending():
    start(resolve(variable=os.environ.get(VARIABLE)).settings)
