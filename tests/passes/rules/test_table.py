"""The table as the engines and the users meet it, and the primitives of a whole train step."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.extend.core import Primitive

from autopar.errors import MissingRuleWarning, UserError
from autopar.ir.graph import Equation
from autopar.ir.rule import Rule
from autopar.passes.rules import table
from autopar.passes.rules.table import find_fault, has_rule, register_sharding_rule, rule_of, warn_missing
from tests.passes.rules.harness import equations_of


@pytest.fixture(autouse=True)
def _no_rules_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_REGISTERED", {})


def layer_norm(x: Any, gain: Any) -> Any:
    centered = x - x.mean(-1, keepdims=True)
    return centered * jax.lax.rsqrt((centered**2).mean(-1, keepdims=True) + 1e-5) * gain


def dropout(key: Any, x: Any) -> Any:
    return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0.0)


def block(p: Any, x: Any, key: Any) -> Any:
    batch, length, width = x.shape
    heads = 4
    first, second = jax.random.split(key)
    parts = jnp.split(layer_norm(x, p["gain"]) @ p["qkv"], 3, -1)
    q, k, v = (part.reshape(batch, length, heads, width // heads).transpose(0, 2, 1, 3) for part in parts)
    scores = jnp.einsum("bhtd,bhsd->bhts", q, k) / jnp.sqrt(width // heads)
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
    mixed = jnp.einsum("bhts,bhsd->bhtd", dropout(first, jax.nn.softmax(scores)), v)
    x = x + mixed.transpose(0, 2, 1, 3).reshape(x.shape)
    return x + dropout(second, jax.nn.gelu(x @ p["up"]) @ p["down"])


def loss(params: Any, batch: Any, key: Any) -> Any:
    first, second = jax.random.fold_in(key, 0), jax.random.fold_in(key, 1)
    x = params["embedding"][batch["x"]] + params["position"][: batch["x"].shape[1]]
    x = block(params["first"], x, first)
    x = jax.checkpoint(block)(params["second"], x, second)
    log_probabilities = jax.nn.log_softmax(x @ params["embedding"].T)
    picked = jnp.take_along_axis(log_probabilities, batch["y"][..., None], -1)[..., 0]
    mask = (batch["y"] != 0).astype(jnp.float32)
    return -(picked * mask).sum() / mask.sum()


WIDTH, VOCABULARY = 16, 32


def gpt_equations(optimizer: Any) -> list[Equation]:
    def weights(key: Any) -> Any:
        shapes = {"qkv": (WIDTH, 3 * WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
        return {"gain": jnp.ones(WIDTH), **{k: jax.random.normal(key, s) for k, s in shapes.items()}}

    key = jax.random.PRNGKey(0)
    params = {
        "embedding": jnp.ones((VOCABULARY, WIDTH)),
        "position": jnp.ones((10, WIDTH)),
        "first": weights(key),
        "second": weights(key),
    }

    def step(params: Any, state: Any, batch: Any, key: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, batch, key)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    batch = {name: jnp.zeros((4, 8), jnp.int32) for name in "xy"}
    return equations_of(step, params, optimizer.init(params), batch, key)


# Primitives of the step that may have nothing to split, and why.
UNSPLITTABLE = {
    "random_split": "a key is split into the few keys that one step needs, all made together",
    "random_wrap": "one key of two words",
    "random_fold_in": "one key and one number",
    "squeeze": "of single keys",
}


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
        optax.sgd(optax.cosine_decay_schedule(0.1, 100), momentum=0.9, nesterov=True),
    ],
    ids=["adamw", "sgd"],
)
def test_every_primitive_of_a_train_step_has_a_rule(optimizer: Any) -> None:
    equations = gpt_equations(optimizer)
    primitives = {equation.primitive.name for equation in equations}
    assert {"gather", "scatter-add", "dot_general", "random_bits"} <= primitives
    assert {name for name in primitives if not has_rule(name)} == set()
    splittable = set()
    for equation in equations:
        rule = rule_of(equation)
        assert find_fault(equation, rule) is None, f"{equation!r}: {find_fault(equation, rule)}"
        assert not rule.replicates
        large = any(n > 1 for x in (*equation.inputs, *equation.outputs) for n in x.shape)
        if not large or len(rule.whole) < len(rule.factors):
            splittable.add(equation.primitive.name)
    assert primitives - splittable <= set(UNSPLITTABLE)


def test_the_batch_of_a_train_step_is_never_whole() -> None:
    """Every array of rank 3 or more with the batch in front can be cut there, whatever the primitive."""
    for equation in gpt_equations(optax.sgd(0.1)):
        rule = rule_of(equation)
        for value, dims in (
            *zip(equation.inputs, rule.inputs, strict=True),
            *zip(equation.outputs, rule.outputs, strict=True),
        ):
            # The batch is 4. No other array of this rank leads with 4.
            if len(value.shape) >= 3 and value.shape[0] == 4:
                assert dims[0], repr(equation)
                assert dims[0][0] not in rule.whole, repr(equation)


def my_kernel_equation(source: str = "model.py:7 (attend)") -> Equation:
    (equation,) = equations_of(lambda x: jax.lax.fori_loop(0, 3, lambda i, y: y * 2, x), jnp.ones((4, 6)))
    return Equation(
        equation.id,
        Primitive("my_kernel"),
        {},
        equation.inputs[-1:],
        equation.outputs[-1:],
        equation.phase,
        source,
    )


def test_a_primitive_without_a_rule_is_replicated() -> None:
    equation = my_kernel_equation()
    rule = rule_of(equation)
    assert rule.replicates
    assert rule.whole == set(range(len(rule.factors)))
    assert find_fault(equation, rule) is None
    assert rule.flops * rule.points() == pytest.approx(48)  # 24 elements read and 24 written


def test_warning_names_primitive_and_source_once() -> None:
    equations = [my_kernel_equation(), my_kernel_equation(), my_kernel_equation("model.py:9 (attend)")]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_missing([*equations, *equations_of(jnp.sin, jnp.ones(4))])
    assert [w.category for w in caught] == [MissingRuleWarning] * 2
    assert str(caught[0].message) == (
        "no sharding rule for primitive 'my_kernel' (from model.py:7 (attend)): its operands are gathered and it runs "
        "whole on every device; give it a rule with @autopar.register_sharding_rule('my_kernel')"
    )
    assert "model.py:9" in str(caught[1].message)


def test_what_a_rule_leaves_whole_is_told_without_a_remedy_for_all_of_its_kind() -> None:
    def by_columns(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, column: (jnp.cumsum(c[::-1] * column), None), x[0], x)[0]

    with pytest.warns(MissingRuleWarning) as caught:
        warn_missing([e for e in equations_of(by_columns, jnp.ones((4, 6))) if e.primitive.name == "scan"])
    assert "nothing in 'scan' can be split" in str(caught[0].message)
    assert "register_sharding_rule" not in str(caught[0].message)


def test_a_users_rule_is_used() -> None:
    assert not has_rule("my_kernel")

    @register_sharding_rule("my_kernel")
    def by_rows(equation: Equation) -> Rule:
        return Rule((4, 6), (((0,), (1,)),), (((0,), (1,)),), whole=frozenset({1}))

    assert has_rule("my_kernel")
    assert rule_of(my_kernel_equation()).whole == {1}
    warn_missing([my_kernel_equation()])  # warnings are errors: there is none


@pytest.mark.parametrize("name", [None, "", 3, jnp.sin])
def test_registering_without_a_name(name: Any) -> None:
    with pytest.raises(UserError, match="takes the name of a primitive"):
        register_sharding_rule(name)


def test_registering_what_is_no_function() -> None:
    with pytest.raises(UserError, match="rule of 'my_kernel' must be a function"):
        register_sharding_rule("my_kernel")(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rule", "fault"),
    [
        ("rows", "returned str instead of a Rule"),
        (Rule((4, 6), (), (((0,), (1,)),)), "maps 0 operands of 1"),
        (Rule((4, 6), (((0,), (1,)),), (((0,), (2,)),)), "uses factors"),
        (Rule((4, 6), (((0,), ()),), (((0,), (1,)),)), r"operand 0 has shape \(4, 6\), its factors give \(4, 1\)"),
        (Rule((4, 6, 4), (((0,), (1,)),), (((2,), (1,)),)), "must be reduced or whole"),
        (Rule((4, 6), (((0,), (1,)),), (((0,), (1,)),), reduced={0: "sum"}), "reduced and yet in a result"),
        (Rule((2, 6, 4), (((0, 0), (1,)),), (((2,), (1,)),)), "uses a factor twice"),
    ],
)
def test_a_users_rule_that_does_not_fit(rule: Any, fault: str) -> None:
    register_sharding_rule("my_kernel")(lambda equation: rule)
    with pytest.raises(UserError, match=fault):
        rule_of(my_kernel_equation())
