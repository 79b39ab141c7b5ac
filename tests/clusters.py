"""A device kind and two links with round numbers, for tests."""

from __future__ import annotations

import dataclasses
from typing import Any

from autopar.ir.mesh import DeviceKind, Link, XlaBackend

IN_TURN = XlaBackend(collective_combine_threshold=0, hides_latency=False)  # collectives one by one, beside no kernels


def toy_kind(name: str = "toy", **changes: Any) -> DeviceKind:
    """A device with round numbers."""
    kind = DeviceKind(
        name=name,
        memory=1 << 30,
        memory_bandwidth=1e10,
        peak_flops={"float32": 1e12},
        matmul_efficiency=0.5,
        memory_efficiency=0.5,
        launch_overhead=1e-6,
        dispatch_overhead=1e-5,
        memory_reserve=0,
        xla=IN_TURN,
    )
    return dataclasses.replace(kind, **changes)


LINK = Link("wire", 1e-6, 1e10)
NETWORK = Link("net", 1e-5, 1e9)
