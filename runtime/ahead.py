"""Programs compiled ahead of time for devices that need not be there."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import io
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from autopar.errors import InternalError, TargetError
from autopar.runtime.source import Source, compile_options

INSTALL = "pip install 'autopar[verify]'"


@dataclasses.dataclass(frozen=True, eq=False)
class Ahead:
    """What XLA says of one program."""

    arguments: int  # bytes on each device
    outputs: int  # bytes, those that take an argument's place included
    aliased: int  # bytes of these
    temporaries: int  # bytes
    text: str  # the optimised HLO
    seconds: float  # to compile it

    @property
    def total(self) -> int:
        """Bytes on each device while it runs."""
        return self.arguments + self.outputs - self.aliased + self.temporaries


def has_compiler() -> bool:
    """Whether there is a compiler for NVIDIA GPUs."""
    return any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))


def absent_gpus(target: str, num_hosts: int, devices_per_host: int) -> Sequence[jax.Device]:
    """GPUs that can be compiled for and nothing else, host by host.

    `target`: the text of XLA's description of the chip (a `GpuTargetConfigProto`).

    Raises:
      TargetError: the compiler is not installed, does not fit this JAX, or does not take the target.
    """
    if not has_compiler():
        raise TargetError(f"XLA's compiler for NVIDIA GPUs is not installed: {INSTALL} (no GPU is needed).")
    from jax.experimental import topologies

    jax.devices("cpu")  # plugins are looked for when the first platform starts
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            topology = topologies.get_topology_desc(
                platform="cuda", topology=f"1x{num_hosts}x{devices_per_host}", target_config=target
            )
    except Exception as error:  # whatever the plugin raises
        version = importlib.metadata.version("jaxlib")
        # JAX looks for CUDA's libraries, which only a GPU needs, before it takes the plugin, where it may use GPUs.
        told = jax.config.values["jax_platforms"]
        first = ""
        if isinstance(error, NotImplementedError) and (not told or "cuda" in told or "gpu" in told):
            first = "On a machine without a GPU say jax.config.update('jax_platforms', 'cpu') before JAX is used. "
        raise TargetError(
            f"XLA's compiler for NVIDIA GPUs does not start ({type(error).__name__}: {str(error)[:300]}). {first}It "
            f"has to be of the version of jaxlib, {version}, and the target a GpuTargetConfigProto in text: {INSTALL}"
        ) from error
    devices: Sequence[jax.Device] = topology.devices
    return devices


def compile_ahead(
    sources: Sequence[Source], progress: Callable[[int, int], None], most_operations: int | None = None
) -> list[tuple[Ahead, int]]:
    """XLA's verdict on each program, with the position of the first that is the same; equal ones are compiled once.

    `progress` is told how many are done of how many.

    Raises:
      TargetError: there are more operations to compile than `most_operations`, or XLA refuses a program.
    """
    lowered: list[Any] = []
    first: dict[Any, int] = {}
    same: list[int] = []
    for index, source in enumerate(sources):
        traced = source.trace()
        low = traced.lower()
        text = low.as_text()
        devices = tuple(device.id for device in source.mesh.devices.flat)
        same.append(first.setdefault((hashlib.sha256(text.encode()).digest(), devices), index))
        options = compile_options(source, traced)
        lowered.append((low, options, text.count(" = ")) if same[-1] == index else None)
    unlike = sorted(set(same))
    operations = sum(lowered[index][2] for index in unlike)
    if most_operations is not None and operations > most_operations:
        raise TargetError(
            f"{len(unlike)} programs of {operations} operations are to be compiled, more than "
            f"most_operations={most_operations}. Allow more (XLA compiles some {_SPEED} a second), or let the model "
            "scan over its layers, which makes programs short."
        )
    verdicts: dict[int, Ahead] = {}
    with concurrent.futures.ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        todo = {pool.submit(_compile, sources[index].name, *lowered[index][:2]): index for index in unlike}
        progress(0, len(unlike))
        for future in concurrent.futures.as_completed(todo):
            verdicts[todo[future]] = future.result()
            progress(len(verdicts), len(unlike))
    return [(verdicts[index], index) for index in same]


_SPEED = 500  # operations a second, two cores


def _compile(name: str, lowered: Any, options: Any) -> Ahead:
    started = time.perf_counter()
    try:
        compiled = lowered.compile(options)
    except Exception as error:  # whatever XLA raises
        raise TargetError(f"XLA does not compile program {name}: {str(error)[:500]}") from error
    use = compiled.memory_analysis()
    if use is None:
        raise InternalError(f"XLA says nothing of the memory of program {name}")
    return Ahead(
        int(use.argument_size_in_bytes), int(use.output_size_in_bytes), int(use.alias_size_in_bytes),
        int(use.temp_size_in_bytes), compiled.as_text() or "", time.perf_counter() - started,
    )  # fmt: skip
