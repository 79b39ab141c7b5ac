"""Public programs: each plans for two devices; a few are run, and give the numbers of one device."""

from __future__ import annotations

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


@pytest.mark.parametrize("name", TINY_PROGRAMS)
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


def test_sizes_for_tests_are_small() -> None:
    step = TINY_PROGRAMS["linen decoder, 2 layers"].make()
    shapes = jax.tree.leaves(jax.eval_shape(step.init, jax.random.key(0)))
    assert max(max(shape.shape, default=0) for shape in shapes) <= TINY.image
