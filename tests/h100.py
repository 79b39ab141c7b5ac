"""H100s that can be compiled for where none is: XLA's verdict on programs for GPUs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Sequence
from typing import Any

import pytest

from autopar.cost_model.targets import load_target
from autopar.runtime.ahead import absent_gpus, has_compiler


def _missing() -> str:
    """What keeps programs from being compiled for NVIDIA GPUs here; "" where nothing does."""
    if not has_compiler():
        return "needs XLA's compiler for NVIDIA GPUs (no GPU): pip install 'autopar[verify]'"
    names = [f"jax-cuda{n}-plugin" for n in (12, 13) if importlib.util.find_spec(f"jax_cuda{n}_plugin")]
    found = {name: importlib.metadata.version(name) for name in names}
    wanted = importlib.metadata.version("jaxlib")
    if wanted in found.values():
        return ""
    return f"needs XLA's compiler for NVIDIA GPUs of the version of jaxlib, {wanted}: there is {found}"


needs_cuda_compiler = pytest.mark.skipif(bool(_missing()), reason=_missing())


def h100_devices(count: int) -> Sequence[Any]:
    """Devices of one host, on which nothing can be put."""
    return absent_gpus(load_target("h100"), 1, count)
