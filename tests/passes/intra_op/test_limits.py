"""What recipes forbid."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp

from autopar import recipes
from autopar.ir.graph import Equation
from autopar.passes.intra_op.limits import Limits, method_limits
from autopar.passes.intra_op.strategies import enumerate_assignments
from autopar.passes.submeshes import mesh_at
from autopar.planning.planner import Planner
from tests.planned import analyse, cluster_of


def test_limits_go_by_the_phase_that_an_equation_has_between_these_stages() -> None:
    """One parameter in four layers: where its gradients are summed depends on where stages begin."""

    def loss(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        for _ in range(4):
            x = jnp.tanh(x @ params["w"])
        return jnp.mean((x - batch["y"]) ** 2)

    def step(params: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    def some(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    analysis = analyse(step, {"w": some(64, 64)}, {"x": some(32, 64), "y": some(32, 64)})
    method, mesh = recipes.auto(zero=1, num_microbatches=4), mesh_at(0, (2,))
    layered = Planner(analysis, cluster_of(1, 4), method, num_layers=4).evaluator.layering.layered(4, True)

    def limits() -> Limits:
        return method_limits(method, layered.step, mesh, lambda: layered.examples, lambda: layered.sequences)

    def allowed(by: Limits, eqn: Equation) -> list[bool]:
        rule = layered.rules[eqn.id]
        return [by.allow_assignment(eqn, rule, each) for each in enumerate_assignments(rule, mesh, frozenset())]

    ways = [[e for p in layered.placed([cut]).programs for e in p.equations] for cut in (1, 2, 3)]
    differ = 0
    for before, after in itertools.permutations(ways, 2):
        used = limits()
        for eqn in before:
            allowed(used, eqn)  # which may not change what is allowed elsewhere
        phases = {eqn.id: eqn.phase for eqn in before}
        for eqn in after:
            assert allowed(used, eqn) == allowed(limits(), eqn)
            differ += phases[eqn.id] is not eqn.phase
    assert differ
