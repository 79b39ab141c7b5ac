"""What a forward program keeps for a backward program of its own: the least bytes from which all can be made again."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar.cost_model.fusion import stored
from autopar.ir.graph import Phase, StepGraph, Value
from autopar.ir.program import PlacedStep
from autopar.ir.rule import Rule
from autopar.passes.batch import analyse_batch
from autopar.passes.batch_axes import resolve_batch_axes
from autopar.passes.microbatch import split_batch
from autopar.passes.pipeline import place
from autopar.passes.residuals import repeated
from autopar.passes.rules.table import rule_of
from autopar.tracing.trace import trace

WIDTH = 8


def _split(model: Callable[[Any, Any], Any], params: Any, dtype: Any = jnp.float32) -> StepGraph:
    """A step of gradient descent in two microbatches."""

    def step(params: Any, x: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            return jnp.mean(model(params, x).astype(jnp.float32) ** 2)

        return jax.tree.map(lambda p, g: p - g.astype(p.dtype), params, jax.grad(loss)(params))

    graph = trace(step, (params, jnp.zeros((4, WIDTH), dtype)), {}, name="step")
    return split_batch(analyse_batch(graph, resolve_batch_axes(graph, "auto"), rule_of), 2)


def _rules(step: StepGraph) -> dict[int, Rule]:
    return {eqn.id: rule_of(eqn) for eqn in step.equations}


def _in_two(step: StepGraph) -> PlacedStep:
    """The step as two stages, of which the second begins with the last product of the forward pass."""
    (*_, last) = (k for k, eqn in enumerate(step.forward) if eqn.primitive.name == "dot_general")
    stages = {eqn.id: int(k >= last) for k, eqn in enumerate(step.forward)}
    return place(step, stages, 2, {}, again=repeated(step, _rules(step)))


def _handed_on(placed: PlacedStep) -> dict[Value, str]:
    """What the backward program of the first stage reads of its forward program, and what made it."""
    forward, backward = (
        next(p for p in placed.programs if p.stage == 0 and p.phase is phase)
        for phase in (Phase.FORWARD, Phase.BACKWARD)
    )
    made = {v: eqn.primitive.name for eqn in forward.equations for v in eqn.outputs}
    assert all(v in forward.outputs for v in backward.inputs if v in made)
    return {v: made[v] for v in backward.inputs if v in made}


def test_of_a_gelu_only_its_operand_and_what_the_next_product_reads_are_kept() -> None:
    def model(params: Any, x: Any) -> Any:
        return jax.nn.gelu(x @ params[0]) @ params[1] @ params[2]

    kept = _handed_on(_in_two(_split(model, [jnp.zeros((WIDTH, WIDTH))] * 3)))
    assert sorted(kept.values()) == ["dot_general", "mul"]


def test_of_a_norm_in_32_bits_its_operand_in_16_is_kept() -> None:
    def norm(x: Any, scale: Any) -> Any:
        wide = x.astype(jnp.float32)
        wide = wide - wide.mean(-1, keepdims=True)
        return (wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * scale).astype(x.dtype)

    def model(params: Any, x: Any) -> Any:
        return norm(x @ params[0], params[3]) @ params[1] @ params[2]

    params = [*[jnp.zeros((WIDTH, WIDTH), jnp.bfloat16)] * 3, jnp.ones(WIDTH)]
    kept = _handed_on(_in_two(_split(model, params, jnp.bfloat16)))
    whole = [v for v in kept if v.shape == (2, WIDTH)]
    assert len(whole) == 2  # the norm's operand, and its result, which the product's derivative reads
    assert all(v.dtype == jnp.bfloat16 for v in whole)


def test_random_bits_are_drawn_once() -> None:
    def model(params: Any, x: Any) -> Any:
        hidden = jnp.tanh(x @ params[0])
        dropped = jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, hidden.shape), hidden, 0)
        return dropped @ params[1] @ params[2]

    placed = _in_two(_split(model, [jnp.zeros((WIDTH, WIDTH))] * 3))
    (backward,) = (p for p in placed.programs if p.stage == 0 and p.phase is Phase.BACKWARD)
    assert not {"random_bits", "threefry2x32", "random_wrap"} & {eqn.primitive.name for eqn in backward.equations}


def test_what_is_computed_again_comes_right_before_its_reader() -> None:
    def model(params: Any, x: Any) -> Any:
        for w in params[:-1]:
            x = jax.nn.gelu(x @ w)
        return x @ params[-1]

    placed = _in_two(_split(model, [jnp.zeros((WIDTH, WIDTH))] * 5))
    (backward,) = (p for p in placed.programs if p.stage == 0 and p.phase is Phase.BACKWARD)
    again = [k for k, eqn in enumerate(backward.equations) if eqn.phase is Phase.FORWARD]
    products = [k for k, eqn in enumerate(backward.equations) if eqn.primitive.name == "dot_general"]
    assert again
    for low, high in itertools.pairwise(products[1::2]):  # each layer has two in its backward pass
        assert any(low < k < high for k in again)
    assert backward.copies == {v for k in again for v in backward.equations[k].outputs}


def _random_model(draw: random.Random) -> Callable[[Any, Any], Any]:
    """Functions of what a product makes, in three types, that share operands, between two products."""
    narrow = [jnp.float32, jnp.bfloat16, jnp.float16]
    plan = [(draw.randrange(3), draw.randrange(k + 1), draw.randrange(k + 1), draw.choice(narrow)) for k in range(4)]

    def model(params: Any, x: Any) -> Any:
        values = [x @ params[0]]
        for kind, left, right, dtype in plan:
            a, b = values[left].astype(dtype), values[right].astype(dtype)
            values.append([lambda a, b: jnp.sin(a) * b, lambda a, b: jnp.exp(a) + b, lambda a, b: a * b][kind](a, b))
        return values[-1].astype(jnp.float32) @ params[1] @ params[2]

    return model


@pytest.mark.parametrize("seed", range(12))
def test_no_other_choice_keeps_fewer_bytes(seed: int) -> None:
    step = _split(_random_model(random.Random(seed)), [jnp.zeros((WIDTH, WIDTH))] * 3)
    rules = _rules(step)
    made = {v: eqn for eqn in step.forward for v in eqn.outputs}
    backward = [eqn for eqn in step.equations if eqn.phase is Phase.BACKWARD]
    read = {v for eqn in backward for v in eqn.values if v in made}
    heavy = {v for eqn in backward if not rules[eqn.id].is_fusible for v in eqn.values if v in made}
    heavy |= {v for eqn in step.equations if not eqn.phase.in_loop for v in eqn.values if v in made}
    in_memory = stored(step.forward, rules, (), heavy)

    def is_enough(kept: set[Value]) -> bool:
        there, todo = set[Value](), [*read]
        while todo:
            v = todo.pop()
            if v in kept or v in there:
                continue
            if v in in_memory or rules[made[v].id].reduced:
                return False
            there.add(v)
            todo += [u for u in made[v].values if u in made]
        return True

    again = repeated(step, rules)
    behind = {u for v in again for u in made[v].values if u in made}
    chosen = ((read | behind) - again.keys()) | heavy
    assert is_enough(chosen)
    others = [v for v in made if v.shape == (2, WIDTH) and v not in heavy]
    always = {v for v in made if v.shape != (2, WIDTH)} | heavy
    least = min(
        sum(v.nbytes for v in some)
        for n in range(len(others) + 1)
        for some in itertools.combinations(others, n)
        if is_enough(always.union(some))
    )
    assert sum(v.nbytes for v in chosen if v in others) == least
