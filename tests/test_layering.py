"""Steps in microbatches and in layers, and their loops cut where stages end."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar import recipes
from autopar.errors import PlanError, UnsplitWarning
from autopar.ir.graph import LeafCut, Phase
from autopar.ir.method import AUTO, Method
from autopar.passes.batch import BatchAnalysis
from autopar.planning.layering import Layered, Layering
from tests import models
from tests.planned import analyse, cluster_of

_CLUSTER = cluster_of(2, 4)


@functools.cache
def _chain(*widths: int) -> BatchAnalysis:
    params = jax.eval_shape(lambda: models.mlp_params(widths))
    batch = jax.eval_shape(lambda: models.mlp_batch(64, widths))
    return analyse(models.sgd(models.mlp_loss), params, batch)


@functools.cache
def _loop(layers: int, carries_loss: bool = False) -> BatchAnalysis:
    def loss(w: Any, batch: Any) -> Any:
        def body(carry: Any, each: Any) -> tuple[Any, None]:
            x, total = carry
            x = jnp.tanh(x @ each)
            return (x, total * 1.5 + jnp.mean(x) if carries_loss else total), None

        (x, total), _ = jax.lax.scan(body, (batch["x"], 0.0), w)
        return jnp.mean((x - batch["y"]) ** 2) + total

    batch = dict.fromkeys("xy", jax.ShapeDtypeStruct((64, 32), jnp.float32))
    return analyse(models.sgd(loss), jax.ShapeDtypeStruct((layers, 32, 32), jnp.float32), batch)


def _layering(analysis: BatchAnalysis, method: Method = AUTO, num_layers: int | None = None) -> Layering:
    return Layering(analysis, _CLUSTER, method, num_layers)


def _products(layered: Layered) -> list[float]:
    """What each layer computes."""
    sums = [0.0] * layered.num_layers
    for eqn, layer in zip(layered.forward, layered.layers, strict=True):
        sums[layer] += layered.rules[eqn.id].products
    return sums


def test_layers_are_of_about_the_same_work() -> None:
    # The second product is three times as much as each other one.
    layered = _layering(_chain(64, 64, 192, 64, 64, 64), num_layers=2).layered(4, True)
    assert layered.num_layers == 2
    assert list(layered.layers) == sorted(layered.layers)
    work = _products(layered)
    assert max(work) <= 5 / 9 * sum(work)
    assert layered.step.num_microbatches == 4


def test_as_many_layers_as_a_method_has_stages() -> None:
    chain = _chain(*[64] * 9)
    assert _layering(chain).layered(1, True).num_layers == 8
    assert _layering(chain, recipes.auto(num_stages=3)).layered(1, True).num_layers >= 3
    with pytest.raises(PlanError, match=r"num_stages=9: each stage needs a heavy operation.* only 8"):
        _layering(chain, recipes.auto(num_stages=9)).layered(1, True)


def test_a_loop_is_cut_for_pipelines_alone() -> None:
    layering = _layering(_loop(6))
    whole = layering.layered(4, False)
    assert whole.analysis is layering.analysis and whole.num_layers == 1
    cut = layering.layered(4, True)
    assert cut.analysis.graph.input_cuts == {0: LeafCut(0, tuple(range(7)))}
    assert cut.num_layers == 6
    assert layering.layered(4, True) is cut
    assert _products(cut) == pytest.approx([_products(whole)[0] / 6] * 6)


def test_loops_are_joined_within_stages() -> None:
    """Each stage has one loop forward and one backward, over its own layers."""
    layering = _layering(_loop(6))
    layered = layering.layered(4, True)
    joined = layering.joined(layered, [2])
    assert joined.analysis.graph.input_cuts == {0: LeafCut(0, (0, 2, 6))}
    assert joined.num_layers == 2
    assert _products(joined) == pytest.approx([2 / 6 * sum(_products(layered)), 4 / 6 * sum(_products(layered))])
    loops = [e for e in joined.step.equations if e.primitive.name == "scan"]
    assert [sum(e.phase is phase for e in loops) for phase in (Phase.FORWARD, Phase.BACKWARD)] == [2, 2]


def test_a_loop_that_hands_on_a_sum_over_the_batch_stays_whole() -> None:
    """Where there are several microbatches; and the user is told once."""
    layering = _layering(_loop(6, carries_loss=True))
    assert layering.layered(1, True).num_layers == 6
    with pytest.warns(UnsplitWarning, match="is not cut between stages where there are several microbatches"):
        assert layering.layered(2, True).num_layers == 1
    assert layering.layered(4, True).num_layers == 1  # a second warning would be an error


def test_layerings_of_one_step_share_its_microbatches() -> None:
    chain = _chain(*[64] * 9)
    first = _layering(chain)
    second = Layering(chain, _CLUSTER, recipes.auto(num_stages=2), 4, like=first)
    alone = _layering(chain, num_layers=4)
    assert second.layered(4, True).step is first.layered(4, True).step
    assert alone.layered(4, True).step is not first.layered(4, True).step
    assert second.layered(4, True).layers == alone.layered(4, True).layers


def test_zero_bubble_has_gradients_of_parameters_apart() -> None:
    layering = _layering(_chain(*[64] * 5))
    layered = layering.layered(4, True)
    same, plain = layering.placed(layered, [2], "1f1b")
    assert same is layered
    _, apart = layering.placed(layered, [2], "zero-bubble")
    phases = [{p.phase for p in placed.programs} for placed in (plain, apart)]
    assert Phase.WEIGHTS not in phases[0]
    assert Phase.WEIGHTS in phases[1]
    # One stage waits for no other.
    assert layering.placed(layered, [], "zero-bubble")[1] is layered.placed([])
