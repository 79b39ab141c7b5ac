"""What JAX or the user computes outside of array operations: own primitives, Pallas kernels, callbacks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

import autopar
from autopar import recipes
from autopar import sharding_rules as rules
from autopar.errors import MissingRuleWarning, UserError
from autopar.passes.rules import table
from autopar.passes.rules.table import warn_missing
from tests.planned import analyse
from tests.random_plans import plan_by_lot
from tests.test_random_programs import close, numbers
from tests.two_layers import assert_close, examples, mean_square, params

twice_p = Primitive("twice_as_the_user_does")
twice_p.def_impl(lambda x: 2 * x)
twice_p.def_abstract_eval(lambda x: jax.core.ShapedArray(x.shape, x.dtype))
ad.deflinear2(twice_p, lambda cotangent, x: [twice_p.bind(cotangent)])
batching.defvectorized(twice_p)
mlir.register_lowering(twice_p, mlir.lower_fun(lambda x: 2 * x, multiple_results=False))


def kernel(x_ref: Any, o_ref: Any) -> None:
    o_ref[...] = jnp.sin(x_ref[...]) * 2


@jax.custom_jvp
def in_pallas(x: Any) -> Any:
    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


in_pallas.defjvp(lambda primals, tangents: (in_pallas(*primals), 2 * jnp.cos(primals[0]) * tangents[0]))


@jax.custom_jvp
def called_back(x: Any) -> Any:
    return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="expand_dims")


called_back.defjvp(lambda primals, tangents: (called_back(*primals), jnp.cos(primals[0]) * tangents[0]))

FOREIGN: dict[str, tuple[Callable[[Any], Any], str]] = {
    "own": (twice_p.bind, "no sharding rule for primitive 'twice_as_the_user_does'"),
    "pallas": (in_pallas, "nothing in 'pallas_call' can be split"),
    "callback": (called_back, "no sharding rule for primitive 'pure_callback': Python is called"),
}


def step_with(function: Callable[[Any], Any]) -> Callable[..., Any]:
    def step(w: Any, x: Any) -> tuple[Any, Any]:
        value, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(function(x @ w))))(w)
        return w - gradient, value

    return step


@pytest.mark.parametrize("name", FOREIGN)
def test_what_has_no_rule_runs_whole(name: str) -> None:
    function, message = FOREIGN[name]
    step, w, x = step_with(function), numbers(8, 8), numbers(8, 8)
    analysis = analyse(step, w, x, batch_axes=(None, 0))
    with pytest.warns(MissingRuleWarning, match=f"{message}.* \\(from .*test_foreign.py:[0-9]+"):
        warn_missing(analysis.graph.equations)
    outputs = plan_by_lot(analysis, (4,), 1, 1, np.random.default_rng(1)).build(jax.devices())([w, x])
    assert all(close(a, b) for a, b in zip(outputs, jax.jit(step)(w, x), strict=True))


def test_the_warning_names_the_users_line() -> None:
    function, _ = FOREIGN["callback"]
    step = autopar.parallelize(step_with(function), batch_axes=(None, 0))
    with pytest.warns(MissingRuleWarning) as caught:
        step.trace(numbers(8, 8), numbers(8, 8))
    assert [w.filename for w in caught] == [__file__]


@pytest.mark.parametrize("name", ["twice_as_the_user_does", "pallas_call"])
def test_with_a_users_rule_it_splits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_REGISTERED", {})

    @autopar.register_sharding_rule(name)
    def by_rows(equation: rules.Equation) -> rules.Rule:
        def emit(local: Any, equation: rules.Equation, operands: Any) -> Any:
            return [FOREIGN["own" if name.startswith("twice") else "pallas"][0](*operands)]

        sizes = equation.inputs[0].shape
        return rules.Rule(sizes, (((0,), (1,)),), (((0,), (1,)),), whole=frozenset({1}), emit=emit)

    function = FOREIGN["own" if name.startswith("twice") else "pallas"][0]
    step, w, x = step_with(function), numbers(8, 8), numbers(8, 8)
    analysis = analyse(step, w, x, batch_axes=(None, 0))
    warn_missing(analysis.graph.equations)  # warnings are errors: there is none
    assert analysis.max_microbatches == 8
    outputs = plan_by_lot(analysis, (2,), 1, 4, np.random.default_rng(1)).build(jax.devices())([w, x])
    assert all(close(a, b) for a, b in zip(outputs, jax.jit(step)(w, x), strict=True))


scaled_rows_p = Primitive("scaled_rows")
scaled_rows_p.def_impl(lambda x, by: x * by[:, None])
scaled_rows_p.def_abstract_eval(lambda x, by: jax.core.ShapedArray(x.shape, x.dtype))
mlir.register_lowering(scaled_rows_p, mlir.lower_fun(lambda x, by: x * by[:, None], multiple_results=False))


def test_a_rule_of_public_names_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of `autopar.sharding_rules`: rows and columns are cut, and sums over them stay partial or not."""
    monkeypatch.setattr(table, "_REGISTERED", {})

    @autopar.register_sharding_rule("scaled_rows")  # [rows, columns], [rows] -> [rows, columns]
    def scaled_rows(equation: rules.Equation) -> rules.Rule:
        factors = rules.Factors()
        rows, columns = factors.dims(equation.inputs[0].shape)
        return factors.rule([(rows, columns), (rows,)], [(rows, columns)])

    def step(w: Any, x: Any, by: Any) -> Any:
        return jnp.tanh(scaled_rows_p.bind(x @ w, by)).sum()

    w, x, by = numbers(8, 8), numbers(8, 8), numbers(8)
    analysis = analyse(step, w, x, by, batch_axes=(None, 0, 0))
    warn_missing(analysis.graph.equations)  # warnings are errors: there is none
    (rule,) = [rules.rule_of(e) for e in analysis.graph.equations if e.primitive is scaled_rows_p]
    assert (rule.factors, rule.inputs, rule.outputs) == ((8, 8), (((0,), (1,)), ((0,),)), (((0,), (1,)),))
    for mesh in ((4,), (2, 2)):
        outputs = plan_by_lot(analysis, mesh, 1, 2, np.random.default_rng(1)).build(jax.devices())([w, x, by])
        assert all(close(a, b) for a, b in zip(outputs, jax.tree.leaves(jax.jit(step)(w, x, by)), strict=True))


# Met by a step that trains.


def with_search(p: Any, batch: Any) -> Any:
    """A search among the parameters, outside of JAX."""

    def loss(p: Any) -> jax.Array:
        shape = jax.ShapeDtypeStruct((2,), p["v"].dtype)
        largest = jax.pure_callback(lambda v: np.sort(v, None)[-2:], shape, jax.lax.stop_gradient(p["v"]))
        return mean_square({"w": p["w"], "v": p["v"] + largest.mean()}, batch)

    value, g = jax.value_and_grad(loss)(p)
    return jax.tree.map(lambda a, b: a - 0.1 * b, p, g), value


@pytest.mark.parametrize(
    "method",
    [recipes.data_parallel(), recipes.data_parallel(2), recipes.gpipe(2, 2), recipes.megatron(2, 4, 1, 1)],
    ids=["data_parallel", "two_microbatches", "pipeline", "megatron"],
)
def test_primitive_without_a_rule(method: autopar.Method) -> None:
    """It runs whole on every device, with one warning that names it and the line."""
    step = autopar.parallelize(with_search, method=method)
    batch = examples(16)
    with pytest.warns(MissingRuleWarning) as caught:
        found = step(params(), batch)
    (warning,) = caught
    text = str(warning.message)
    assert text.startswith("no sharding rule for primitive 'pure_callback': Python is") and "test_foreign.py:" in text
    assert "its operands are gathered and it runs whole on every device" in text
    assert "@autopar.register_sharding_rule('pure_callback')" in text
    assert_close(found, jax.jit(with_search)(params(), batch))
    wanted = jax.jit(with_search)(autopar.gather(found[0]), batch)
    with warnings.catch_warnings(action="error"):  # once, not at every step
        assert_close(step(found[0], batch), wanted)


def doubling(p: Any, batch: Any) -> Any:
    value, g = jax.value_and_grad(lambda p: mean_square(p, {"x": twice_p.bind(batch["x"] @ p["w"])}))(p)
    return jax.tree.map(lambda a, b: a - 0.1 * b, p, g), value


def elementwise(equation: rules.Equation) -> rules.Rule:
    sizes = equation.inputs[0].shape
    dims = tuple((d,) for d in range(len(sizes)))
    return rules.Rule(sizes, (dims,), (dims,), linear=(frozenset({0}),))


def test_rule_for_a_users_primitive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it there is a warning and no microbatching; with it neither."""
    monkeypatch.setattr(table, "_REGISTERED", {})
    with pytest.warns(MissingRuleWarning, match="'twice_as_the_user_does'"):
        coupled = autopar.parallelize(doubling).trace(params(), examples(16)).graph
    assert any(e.primitive is twice_p for e in coupled.equations)
    assert autopar.register_sharding_rule("twice_as_the_user_does")(elementwise) is elementwise
    step = autopar.parallelize(doubling, method=recipes.data_parallel(2))
    assert_close(step(params(), examples(16)), jax.jit(doubling)(params(), examples(16)))


def test_rule_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_REGISTERED", {})

    @autopar.register_sharding_rule("twice_as_the_user_does")
    def too_short(equation: rules.Equation) -> rules.Rule:
        return rules.Rule((3,), (((0,),),), (((0,),),))

    message = "the sharding rule registered for primitive 'twice_as_the_user_does' does not fit"
    with pytest.raises(UserError, match=message):
        autopar.parallelize(doubling).trace(params(), examples())


def test_rule_for_no_name() -> None:
    with pytest.raises(UserError, match="register_sharding_rule takes the name of a primitive"):
        autopar.register_sharding_rule(elementwise)  # type: ignore[arg-type]
