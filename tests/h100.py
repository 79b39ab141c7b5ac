"""H100s that can be compiled for where none is: XLA's verdict on programs for GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from autopar.cost_model.targets import load_target
from autopar.runtime.ahead import absent_gpus, has_compiler

needs_cuda_compiler = pytest.mark.skipif(
    not has_compiler(), reason="needs XLA's compiler for NVIDIA GPUs (no GPU): pip install 'autopar[verify]'"
)


def h100_devices(count: int) -> Sequence[Any]:
    """Devices of one host, on which nothing can be put."""
    return absent_gpus(load_target("h100"), 1, count)
