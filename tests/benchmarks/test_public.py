"""Public programs: they plan for two devices, and a few are run; how rows of the verify suite are judged."""

from __future__ import annotations

import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes
from benchmarks.public.program import Program
from benchmarks.public.programs import TINY, programs, tiny
from benchmarks.public.verified import Row, bars, slope

TINY_PROGRAMS = {program.name: program for program in map(tiny, programs())}
# Of every framework, and of every kind: norms, dropout, loops, checkpoints, convolutions, evaluation.
RUN = (
    "linen language model, 2 layers",
    "linen decoder, scanned, checkpoint, 2 layers",
    "linen resnet, 2 layers",
    "nnx gemma, checkpoint, 2 layers",
    "equinox mixer, 2 layers",
    "haiku language model, 2 layers",
    "hugging face bert, 2 layers",
    "hugging face gpt2, evaluation, 2 layers",
)


def _parallel(program: Program) -> tuple[Any, Any]:
    step = program.make()
    return step, autopar.parallelize(step.function, devices=jax.devices()[:2], method=recipes.data_parallel(1))


def test_programs_have_names_of_their_own_and_families_of_several_depths() -> None:
    names = [program.name for program in programs()]
    assert len(set(names)) == len(names)
    depths: dict[str, set[int]] = {}
    for program in programs():
        depths.setdefault(program.family, set()).add(program.variant.layers)
    assert sum({2, 8, 24} <= each for each in depths.values()) >= 8


@pytest.mark.parametrize(
    "name", [name if name in RUN else pytest.param(name, marks=pytest.mark.slow) for name in TINY_PROGRAMS]
)
def test_it_plans_for_two_devices(name: str) -> None:
    step, parallel = _parallel(TINY_PROGRAMS[name])
    plan = parallel.plan(*step.abstract())
    assert plan.num_devices == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN)
def test_numbers_are_those_of_one_device(name: str) -> None:
    if name not in TINY_PROGRAMS:
        pytest.skip("the extra hugging-face is not there")
    step, parallel = _parallel(TINY_PROGRAMS[name])
    arguments = step.random(jax.random.key(1))
    expected = jax.jit(step.function)(*arguments)
    with warnings.catch_warnings(action="ignore"):
        found = autopar.gather(parallel(*arguments))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(other.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=2e-3, atol=2e-4)


def _row(family: str, layers: int, ratio: float) -> Row:
    return Row(f"{family} {layers}", family, layers, (ratio, 1.0), (1.0, 1.0), (1.0, 1.0), 0.0, 0.0)


def test_a_trend_with_depth_is_within_families() -> None:
    """One family off by a factor at every depth has no trend; one whose ratio grows as the root of the depth has."""
    level = [_row("level", n, 1.5) for n in (2, 8, 24)] + [_row("alone", 100, 9.0)]
    assert slope(level, "moved") == pytest.approx(0.0, abs=1e-12)
    assert slope([_row("growing", n, n**0.5) for n in (2, 8, 24)], "moved") == pytest.approx(0.5)
    assert math.isnan(slope([_row("alone", 8, 9.0)], "moved"))


def test_bars_are_of_all_rows() -> None:
    found = bars([_row("one", 2, 1.2), _row("one", 8, 0.9), _row("other", 2, 1.1)])
    assert found["public_moved_median"].value == pytest.approx(0.1)
    assert found["public_moved_95th_percentile"].value == pytest.approx(0.19)
    assert found["public_launches_slope"].value == pytest.approx(0.0)
    assert bars([]) == {}


def test_sizes_for_tests_are_small() -> None:
    step = TINY_PROGRAMS["linen decoder, 2 layers"].make()
    shapes = jax.tree.leaves(jax.eval_shape(step.init, jax.random.key(0)))
    assert max(max(shape.shape, default=0) for shape in shapes) <= TINY.image
