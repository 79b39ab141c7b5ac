"""Plans that are kept in a folder: found again for the same, and for nothing else."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes, sharding_rules
from autopar.passes.rules import table
from autopar.planning import plan_cache
from autopar.planning.traced import TracedStep


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Of the kept plans."""
    monkeypatch.setenv(plan_cache.FOLDER, os.fspath(tmp_path / "plans"))
    return tmp_path / "plans"


def _step_with(inner: Callable[[Any], Any] = jnp.tanh) -> Callable[..., Any]:
    """A scan over layers, in which alone `inner` is."""

    def train_step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            def layer(h: Any, w: Any) -> Any:
                return inner(h @ w).astype(h.dtype), None

            return (jax.lax.scan(layer, x, params)[0] ** 2).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    return train_step


PARAMS, X = np.ones((2, 16, 16), np.float32), np.ones((8, 16), np.float32)


def _planned(step: Any = None, params: Any = PARAMS, x: Any = X, hosts: int = 1, **options: Any) -> autopar.Planned:
    cluster = autopar.load_preset("dgx-a100", num_hosts=hosts, devices_per_host=4)
    return autopar.parallelize(step or _step_with(), cluster=cluster, **options).plan(params, x)


METHODS = ["auto", recipes.zero(3), recipes.auto(num_stages=1), recipes.megatron(2, 2, 1)]


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_what_was_planned_before_is_not_planned_again(
    method: Any, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = _planned(method=method)
    (kept,) = folder.iterdir()
    assert kept.name.startswith("train_step-") and autopar.Plan.load(kept) == planned

    def search(*_: Any, **__: Any) -> Any:
        raise AssertionError("it is planned again")

    monkeypatch.setattr(TracedStep, "search", search)
    again = _planned(method=method)
    assert again == planned and again.method == planned.method
    assert again.with_programs().as_text() == planned.as_text()
    with pytest.raises(AssertionError, match="planned again"):
        _planned(method=method, params=np.ones((3, 16, 16), np.float32))


def _rule(is_cut: bool) -> Any:
    def rule(equation: Any) -> Any:
        shape, factors = equation.inputs[0].shape, sharding_rules.Factors()
        dims = factors.dims(shape, () if is_cut else range(len(shape)))
        return factors.rule([dims], [dims])

    return rule


FIRST: Any = (np.int64(0),)
SECOND: Any = (np.int64(1),)


@pytest.mark.filterwarnings("ignore::autopar.errors.MissingRuleWarning", "ignore::autopar.errors.UnsplitWarning")
def test_of_what_differs_each_has_its_own(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others: list[Callable[[], object]] = [
        lambda: _planned(),
        lambda: _planned(hosts=2),
        lambda: _planned(x=X[:4]),
        lambda: _planned(x=X.astype(np.float16)),
        lambda: _planned(method=recipes.zero(3)),
        lambda: _planned(method=recipes.zero(2)),
        lambda: _planned(num_microbatches=2),
        lambda: _planned(reduce_dtype=None),
        lambda: _planned(donate_argnums=()),
        lambda: _planned(batch_axes=(None, 1), x=X.T.copy(), step=lambda p, x: _step_with()(p, x.T)),
        lambda: _planned(step=_step_with(jnp.sin)),  # only within the scan
        lambda: _planned(step=_step_with(lambda h: jax.lax.rev(h, FIRST))),
        lambda: _planned(step=_step_with(lambda h: jax.lax.rev(h, SECOND))),
        lambda: _planned(step=_step_with(lambda h: 2 * h)),
        lambda: _planned(step=_step_with(lambda h: 3 * h)),
    ]
    for number, plan in enumerate(others, start=1):
        plan()
        assert len(list(folder.iterdir())) == number
    for plan in others:
        plan()
    assert len(list(folder.iterdir())) == len(others)
    monkeypatch.setattr(table, "_REGISTERED", {})
    for is_cut in (True, False):  # a rule of the user's, of one code
        autopar.register_sharding_rule("tanh")(_rule(is_cut))
        _planned()
    monkeypatch.setattr(table, "_REGISTERED", {})
    table._rule_of.cache_clear()
    table._LOOPS.forget()
    monkeypatch.setattr(plan_cache, "_sources", lambda: "another version")
    _planned()
    assert len(list(folder.iterdir())) == len(others) + 3


def test_what_cannot_be_read_is_planned_again(folder: pathlib.Path) -> None:
    planned = _planned()
    (kept,) = folder.iterdir()
    whole = kept.read_text()
    for text in ("", whole[:100], whole.replace('"version"', '"version_"', 1)):
        kept.write_text(text)
        assert _planned() == planned
        assert autopar.Plan.load(kept) == planned


def test_a_folder_that_cannot_be_written_stops_nobody(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(plan_cache.FOLDER, os.fspath(tmp_path / "file" / "plans"))
    with pytest.warns(UserWarning, match="AUTOPAR_PLAN_CACHE: the plan is not kept: .*file"):
        planned = _planned()
    monkeypatch.delenv(plan_cache.FOLDER)
    assert _planned() == planned


def test_a_plan_that_does_not_go_with_the_step_is_made_anew(folder: pathlib.Path) -> None:
    planned = _planned()
    (kept,) = folder.iterdir()
    kept.write_text(kept.read_text().replace(planned.fingerprint, "0" * len(planned.fingerprint)))
    assert _planned() == planned
    assert autopar.Plan.load(kept) == planned


def test_nothing_is_kept_of_a_search_that_time_ends_or_with_hints(folder: pathlib.Path) -> None:
    _planned(method=recipes.auto(time_limit=1000))
    _planned(hints={"params": (None, None, -1)})
    assert not folder.exists()


def test_what_is_made_on_the_way_makes_no_other_version() -> None:
    """Numba keeps what it has compiled beside the code, once the first plan is made."""
    kept = pathlib.Path(plan_cache.__file__).parent / "__pycache__" / "made-on-the-way.nbi"
    before = plan_cache._sources.__wrapped__()
    kept.parent.mkdir(exist_ok=True)
    kept.write_text("")
    try:
        assert plan_cache._sources.__wrapped__() == before
    finally:
        kept.unlink()


def test_another_process_finds_it(folder: pathlib.Path) -> None:
    for seed in "12":
        script = "from tests import test_plan_cache as t; t._planned(); t._planned(step=t._step_with(jax.nn.gelu))"
        environment = {**os.environ, "PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"}
        subprocess.run([sys.executable, "-c", f"import jax; {script}"], env=environment, check=True, timeout=120)
        assert len(list(folder.iterdir())) == 2
