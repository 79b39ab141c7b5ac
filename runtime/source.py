"""Programs to compile, here or for devices that are not there."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from jax.extend.core import jaxprs_in_params

from autopar.ir.mesh import LATENCY_HIDING_FLAG
from autopar.runtime.placement import Array, weakly_typed
from autopar.runtime.processes import this_job


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """A program to compile: a function of local pieces, and the arrays at its border."""

    name: str
    function: Callable[..., tuple[Any, ...]]
    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]
    donated: tuple[int, ...]
    hides_latency: bool  # whether the prices of its collectives count on kernels that run beside them

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """Where it runs."""
        return (*self.inputs, *self.outputs)[0].sharding.mesh  # type: ignore[return-value]

    def jitted(self) -> Any:
        """The program as a jitted function of global arrays, not yet traced."""
        mapped = jax.shard_map(
            self.function,
            mesh=self.mesh,
            in_specs=tuple(a.sharding.spec for a in self.inputs),
            out_specs=tuple(a.sharding.spec for a in self.outputs),
            check_vma=False,
        )
        weak = [a.weak_type for a in self.outputs]

        def program(*xs: Any) -> tuple[Any, ...]:
            results = mapped(*xs)  # of a `shard_map`, and so of types that are not weak
            return tuple(weakly_typed(x) if w else x for x, w in zip(results, weak, strict=True))

        program.__name__ = self.name
        return jax.jit(
            program,
            in_shardings=tuple(a.sharding for a in self.inputs),
            out_shardings=tuple(a.sharding for a in self.outputs),
            donate_argnums=self.donated,
            keep_unused=True,
        )

    def trace(self) -> Any:
        borders = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for a in self.inputs]
        with beside_no_other(self.mesh):
            return self.jitted().trace(*borders)

    def lower(self) -> Any:
        traced = self.trace()
        with beside_no_other(self.mesh):
            return traced.lower()


def beside_no_other(mesh: jax.sharding.Mesh) -> contextlib.AbstractContextManager[Any]:
    """A context for a program on a mesh, where the caller may have set another, with which JAX would refuse it."""
    return contextlib.nullcontext() if jax.sharding.get_abstract_mesh().empty else jax.set_mesh(mesh)


def compile_options(source: Source, traced: Any) -> Mapping[str, Any]:
    """What XLA has to be told to compile a program: to hide latency, too, unless XLA_FLAGS names the flag for it."""
    devices = source.mesh.devices.flat
    platform = devices[0].platform
    options: dict[str, Any] = {}
    if platform == "cpu" and _widens_products(traced.jaxpr.jaxpr):
        options = _SAFE_PRODUCTS
    if platform == "gpu" and source.hides_latency and LATENCY_HIDING_FLAG not in os.environ.get("XLA_FLAGS", ""):
        options = {LATENCY_HIDING_FLAG: True}
    return {**options, **compiler_options(devices)}


# XLA leaves some products of bfloat16 with a result in float32 to a kernel that has none for them, if the result is
# transposed, and fails when it runs (CPU, jaxlib 0.10.2). Without these fusions it casts the operands.
_SAFE_PRODUCTS = {"xla_cpu_experimental_ynn_fusion_type": ""}


def _widens_products(jaxpr: Any) -> bool:
    """Whether an operation that can be told the type of its result gives more bits than its operands have."""
    return any(
        (
            eqn.params.get("preferred_element_type") is not None
            and eqn.outvars[0].aval.dtype.itemsize > eqn.invars[0].aval.dtype.itemsize
        )
        or any(map(_widens_products, jaxprs_in_params(eqn.params)))
        for eqn in jaxpr.eqns
    )


def compiler_options(devices: Iterable[jax.Device]) -> dict[str, Any]:
    """What XLA has to be told to compile a program for these devices, where other processes compile others meanwhile.

    For GPUs it shares the choice of kernels out among processes, each of which then waits for what the others say about
    the same program. That is kept where all processes have a part in the program, so that they choose alike. Where some
    have none, it has been seen to wait for ever (https://github.com/marin-community/marin/issues/7024); each then
    chooses by itself, and those that share the program may choose differently.
    """
    job = this_job()
    if job is None:
        return {}
    devices = list(devices)
    is_of_all = len({device.process_index for device in devices}) == job.count
    return {} if is_of_all or devices[0].platform != "gpu" else {"xla_gpu_shard_autotuning": False}
