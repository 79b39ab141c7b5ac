"""`jax.custom_partitioning`: the user's rule says what is cut, and the user's `partition` computes the pieces."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

import autopar
from autopar import recipes
from autopar.passes.rules.table import rule_of
from tests.passes.rules.cases import floats
from tests.passes.rules.harness import Application, apply, check_pieces, equations_of
from tests.test_foreign import twice_p


def scaled_softmax(x: Any, scale: Any) -> Any:
    """With an operator that nothing is known of."""
    return twice_p.bind(jax.nn.softmax(x, -1)) * scale


def as_given(mesh: Any, operands: Any, result: Any, function: Callable[..., Any] = scaled_softmax) -> Any:
    """Pieces of whatever is cut are computed as the whole."""
    return mesh, function, result.sharding, jax.tree.map(lambda x: x.sharding, operands)


def partitioned(rule: Any, partition: Any = as_given, function: Any = scaled_softmax, **factors: Any) -> Any:
    call = custom_partitioning(function)
    call.def_partition(partition=partition, sharding_rule=rule, **factors)
    return call


def application(function: Any, *operands: Any) -> Application:
    (equation,) = equations_of(function, *operands)
    return apply(equation, operands)


def sizes_cut(function: Any, *operands: Any) -> list[int]:
    rule = rule_of(application(function, *operands).equation)
    return sorted(rule.factors[f] for f in rule.splittable)


X, SCALE = floats(4, 6, 8), floats(8)
RULE = "b t n, n -> b t n"


@pytest.mark.parametrize(
    "function",
    [
        partitioned(RULE, need_replication_factors=("n",)),
        partitioned("... n, n -> ... n", need_replication_factors=("n",)),
        partitioned(
            SdyShardingRule(
                (ArrayMapping("b", "t", "n"), ArrayMapping("n")),
                (ArrayMapping("b", "t", "n"),),
                need_replication_factors=("n",),
            )
        ),
        partitioned(lambda mesh, operands, results: (RULE, {"need_replication_factors": ("n",)})),
    ],
    ids=["letters", "ellipsis", "object", "function"],
)
def test_what_the_rule_says_is_cut(function: Any) -> None:
    assert sizes_cut(function, X, SCALE) == [4, 6]
    assert check_pieces(application(function, X, SCALE)) > 2


def test_parts_of_a_dimension() -> None:
    """Heads of a dimension that holds them and their width."""

    def by_head(x: Any) -> Any:
        return jnp.cumsum(x.reshape(*x.shape[:-1], -1, 4), -1).reshape(x.shape)

    partition = functools.partial(as_given, function=by_head)
    function = partitioned("b (h d) -> b (h d)", partition, by_head, need_replication_factors=("d",), h=6, d=4)
    x = floats(4, 24)
    assert sizes_cut(function, x) == [4, 6]
    assert check_pieces(application(function, x)) > 2


def test_reductions_stay_whole() -> None:
    def summed(x: Any) -> Any:
        return twice_p.bind(x).sum(-1)

    partition = functools.partial(as_given, function=summed)
    function = partitioned("b n -> b", partition, summed, reduction_factors=("n",))
    assert sizes_cut(function, floats(4, 6)) == [4]


def test_what_partition_does_otherwise_stays_whole() -> None:
    """It takes rows whole, or sums over an axis of the mesh, or does not know such a mesh."""

    def whole_rows(mesh: Any, operands: Any, result: Any) -> Any:
        spec = NamedSharding(mesh, PartitionSpec(None, *result.sharding.spec[1:]))
        return mesh, scaled_softmax, spec, (spec, operands[1].sharding)

    def over_the_mesh(mesh: Any, operands: Any, result: Any) -> Any:
        def function(x: Any, scale: Any) -> Any:
            return scaled_softmax(x, scale) + jax.lax.axis_index(mesh.axis_names[0])

        return as_given(mesh, operands, result, function)

    def only_on_eight(mesh: Any, operands: Any, result: Any) -> Any:
        assert mesh.size == 8
        return as_given(mesh, operands, result)

    def one_at_a_time(mesh: Any, operands: Any, result: Any) -> Any:
        assert len(mesh.axis_names) == 1
        return as_given(mesh, operands, result)

    def of_the_whole_size(mesh: Any, operands: Any, result: Any) -> Any:
        return as_given(mesh, operands, result, lambda x, scale: jnp.zeros(result.shape))

    def in_pairs(mesh: Any, operands: Any, result: Any) -> Any:
        assert mesh.size == 2
        return as_given(mesh, operands, result)

    for partition, cut in (
        (whole_rows, [6]), (over_the_mesh, []), (only_on_eight, []), (one_at_a_time, [4]), (of_the_whole_size, []),
        (in_pairs, []),
    ):  # fmt: skip
        function = partitioned(RULE, partition, need_replication_factors=("n",))
        assert sizes_cut(function, X, SCALE) == cut


def test_without_a_rule_it_is_taken_apart() -> None:
    def step(params: Any, x: Any) -> Any:
        call = custom_partitioning(lambda x: jnp.tanh(x))
        call.def_partition(partition=as_given, infer_sharding_from_operands=lambda mesh, args, result: args[0].sharding)
        return params + jnp.sum(call(x)), 0.0

    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        traced = autopar.parallelize(step, batch_axes=(None, 0)).trace(jnp.ones(()), floats(8, 4))
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)
    assert "tanh" in {e.primitive.name for e in traced.graph.equations}


@jax.custom_vjp
def with_gradient(x: Any, scale: Any) -> Any:
    return partitioned(RULE, need_replication_factors=("n",))(x, scale)


def plain(x: Any, scale: Any) -> Any:
    return 2 * jax.nn.softmax(x, -1) * scale


with_gradient.defvjp(lambda *xs: (with_gradient(*xs), xs), lambda xs, given: jax.vjp(plain, *xs)[1](given))


@pytest.mark.parametrize("method", [recipes.data_parallel(2), recipes.auto()], ids=lambda method: method.name)
def test_a_step(method: Any) -> None:
    """In microbatches and over devices, without a warning: nothing is gathered for it."""

    def step(params: Any, x: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            return jnp.mean(with_gradient(x @ params["w"], params["scale"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    params, x = {"w": floats(8, 8), "scale": SCALE}, floats(32, 4, 8)
    actual = jax.tree.map(autopar.gather, autopar.parallelize(step, method=method)(params, x))
    for found, expected in zip(jax.tree.leaves(actual), jax.tree.leaves(jax.jit(step)(params, x)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
