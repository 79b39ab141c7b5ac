"""Reshardings as tests ask for them: the steps of one, and the collectives among steps."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cost_model.reshard import LOCAL_KINDS, Resharder, StepPrice, applied_steps
from autopar.ir.mesh import Mesh
from autopar.ir.sharding import Collective, ReshardStep, Sharding


def plan_reshard(
    shape: tuple[int, ...], itemsize: int, source: Sharding, target: Sharding, mesh: Mesh, price: StepPrice
) -> tuple[ReshardStep, ...]:
    """The cheapest steps from `source` to `target`."""
    return Resharder(mesh, price).plan(shape, itemsize, source, target)


def step_collectives(
    steps: Sequence[ReshardStep], shape: tuple[int, ...], itemsize: int, before: Sharding, mesh: Mesh
) -> tuple[Collective, ...]:
    """The collectives among the steps, in order; steps over axes of size 1 are none."""
    return tuple(
        Collective(each.step.kind, each.axes, each.payload)
        for each in applied_steps(steps, shape, itemsize, before, mesh)
        if each.axes and each.step.kind not in LOCAL_KINDS
    )
