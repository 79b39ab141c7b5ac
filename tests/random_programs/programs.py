"""Random programs over the rule table, as train steps and as functions without a gradient.

A program is a list of links. A link takes arrays made so far and adds one; each kind of link draws what it needs so
that it is always legal. What is not continuous (orders, maxima, roundings) gets values without ties and no gradient:
where XLA rounds an element in two ways, `jax.jit` alone would differ from itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from hypothesis import strategies as st

from tests.random_programs import arithmetic, control, places
from tests.random_programs.drawer import Drawer, Env


@dataclasses.dataclass(frozen=True)
class RandomProgram:
    """A function of weights and a batch, and numbers to call it with."""

    function: Callable[[dict[str, Any], dict[str, Any]], Any]
    weights: dict[str, Any]
    batch: dict[str, Any]  # examples along axis 0
    kinds: tuple[str, ...]  # of its links, in order


_KINDS: tuple[Callable[[Drawer], None], ...] = (  # some twice, to be drawn twice as often
    arithmetic.unary, arithmetic.binary, arithmetic.with_weight, arithmetic.product, arithmetic.product,
    arithmetic.product_of_two, arithmetic.reduction, arithmetic.normalise, arithmetic.along, arithmetic.order,
    places.transpose, places.fold, places.fold, places.cut, places.dynamic, places.look_up, places.pick,
    places.scatter, places.count, places.to_floats, places.one_hot, arithmetic.convolution, arithmetic.pool,
    control.loop, control.branch, control.dropout, control.own_derivative, control.rematerialise, arithmetic.system,
    arithmetic.groups, arithmetic.attention, arithmetic.attention,
)  # fmt: skip


@st.composite
def programs(draw: Callable[[st.SearchStrategy[Any]], Any]) -> RandomProgram:
    """Random programs: three in four are train steps."""
    drawer = Drawer(draw)
    arithmetic.product(drawer)
    for kind in draw(st.lists(st.sampled_from(_KINDS), min_size=1, max_size=6)):
        kind(drawer)
    links, infos = tuple(drawer.links), tuple(drawer.infos)
    trains = draw(st.integers(0, 3)) > 0
    mean = draw(st.booleans())
    last = len(infos) - 1

    def arrays(weights: dict[str, Any], batch: dict[str, Any]) -> Env:
        env = [batch["x"], batch["tokens"]]
        for link in links:
            env.append(link(env, weights))
        return env

    def loss(weights: dict[str, Any], batch: dict[str, Any]) -> tuple[Any, Any]:
        env = arrays(weights, batch)
        total = jnp.float32(0)
        for info, x in zip(infos[2:], env[2:], strict=True):
            if not info.integer:
                total += (jnp.mean if mean else jnp.sum)(jnp.sin(x)) / (1 if mean else 64)
        return total, results(env)

    def results(env: Env) -> dict[str, Any]:
        found = {"last": env[last]}
        numbers = [x for info, x in zip(infos, env, strict=True) if info.integer]
        return {**found, "integers": numbers[-1]}

    def step(weights: dict[str, Any], batch: dict[str, Any]) -> Any:
        (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(weights, batch)
        return jax.tree.map(lambda w, g: w - g, weights, grads), value, aux

    def forward(weights: dict[str, Any], batch: dict[str, Any]) -> Any:
        return results(arrays(weights, batch))

    return RandomProgram(step if trains else forward, drawer.weights, drawer.batch, tuple(drawer.kinds))
