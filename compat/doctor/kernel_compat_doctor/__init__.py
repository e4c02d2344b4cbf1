"""Diagnosis of installed extensions of torch, read from their metadata and ELF files: nothing of them is imported."""

from __future__ import annotations

from .diagnosis import Built, Diagnosis, Package, diagnose
from .finding import CAUSES, Finding
from .libtorch import LibTorch
from .ways import Machine, Way, ways

__all__ = ["CAUSES", "Built", "Diagnosis", "Finding", "LibTorch", "Machine", "Package", "Way", "diagnose", "ways"]
