"""H100s that can be compiled for where none is: XLA's verdict on programs for GPUs."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import pathlib
from collections.abc import Sequence
from typing import Any

import pytest

needs_cuda_compiler = pytest.mark.skipif(
    not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)),
    reason="needs jax's CUDA plugin (no GPU): pip install jax[cuda12]",
)


def h100_devices(count: int) -> Sequence[Any]:
    """Devices of one host, on which nothing can be put."""
    from jax.experimental import topologies

    target = (pathlib.Path(__file__).parent / "data" / "h100.txtpb").read_text()
    with contextlib.redirect_stderr(io.StringIO()):
        topology = topologies.get_topology_desc(platform="cuda", topology=f"1x1x{count}", target_config=target)
    return topology.devices
