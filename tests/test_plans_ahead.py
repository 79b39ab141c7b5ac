"""Plans for a next start: for the devices that it will have, and the same as that start would make."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.experimental.custom_partitioning import custom_partitioning

import autopar
from autopar.cost_model.hardware import cluster_from_devices
from autopar.errors import ArgumentError
from autopar.ir.method import AUTO
from autopar.planning import plan_cache, plans_ahead
from autopar.planning.traced import TracedStep
from autopar.runtime.local_job import ELASTIC, LAUNCHED
from tests import small_steps
from tests.processes.start import environment

LIMIT = 240  # seconds


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Of the kept plans."""
    monkeypatch.setenv(plan_cache.FOLDER, os.fspath(tmp_path / "plans"))
    return tmp_path / "plans"


# ----------------------------------------------------------------------------------------------------------------------
# For which devices


def _job(hosts: int, processes: int, each: int, platform: str = "gpu", domains: bool = True) -> list[Any]:
    """The devices of a job of so many processes on each of so many hosts."""
    kind = "NVIDIA H100 80GB HBM3" if platform == "gpu" else "cpu"
    return [
        plans_ahead._OtherDevice(platform, kind, host * processes + process, None, host if domains else None)
        for host in range(hosts)
        for process in range(processes)
        for _ in range(each)
    ]


@dataclasses.dataclass(frozen=True)
class _Here(plans_ahead._OtherDevice):
    """Of this process."""

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_limit": 60 << 30}


def _others(devices: Sequence[Any], least: int = 1, most: int = 100) -> list[autopar.Cluster]:
    """As process 0 sees them, which alone knows how much memory its devices have."""
    here = [_Here(**vars(device)) if device.process_index == 0 else device for device in devices]
    return list(plans_ahead.other_clusters(here, least, most))


def _clusters(*jobs: Sequence[Any]) -> list[autopar.Cluster]:
    return [cluster_from_devices([_Here(**vars(d)) if d.process_index == 0 else d for d in job]) for job in jobs]


def test_one_process_fewer_and_one_more_on_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LAUNCHED, "1")
    assert _others(_job(1, 4, 2)) == _clusters(_job(1, 3, 2), _job(1, 5, 2))
    assert _others(_job(1, 1, 8)) == _clusters(_job(1, 2, 8))
    assert _others(_job(1, 4, 2), least=4, most=4) == []
    assert _others(_job(1, 4, 2), least=4, most=5) == _clusters(_job(1, 5, 2))
    cpus = [_job(n, 1, 2, "cpu", domains=False) for n in (1, 2, 3)]
    assert _others(cpus[1]) == _clusters(cpus[0], cpus[2])


def test_one_host_fewer_and_one_more_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LAUNCHED, raising=False)
    for processes, each in ((1, 8), (8, 1), (2, 4)):
        assert _others(_job(3, processes, each)) == _clusters(_job(2, processes, each), _job(4, processes, each))
    assert _others(_job(1, 1, 8)) == _clusters(_job(2, 1, 8))
    assert _others(_job(1, 8, 1)) == _clusters(_job(1, 7, 1), _job(2, 8, 1))  # one process of a host, or a host
    assert _others(_job(3, 8, 1), least=20, most=31) == []
    hosts = [_job(n, 1, 4, domains=False) for n in (1, 2, 3)]
    assert _others(hosts[1]) == _clusters(hosts[0], hosts[2])


@pytest.mark.parametrize("text", ["2", "3:2", "0:2", "a:b", "-1:2"])
def test_bounds_that_make_no_sense(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ELASTIC, text)
    with pytest.raises(ArgumentError, match=f"AUTOPAR_ELASTIC='{text}' is no MIN:MAX"):
        plans_ahead._bounds()


# ----------------------------------------------------------------------------------------------------------------------
# The same plans


class _Block(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        h = nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x), mask=nn.make_causal_mask(jnp.ones(x.shape[:2])))
        x = x + nn.Dropout(0.1, deterministic=False)(h)
        return x + nn.Dense(16)(nn.gelu(nn.Dense(32)(nn.LayerNorm()(x))))


class _Model(nn.Module):
    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        x = nn.Embed(32, 16)(tokens)
        for _ in range(2):
            x = nn.remat(_Block)()(x)
        return nn.Dense(32)(x)


def _flax() -> TracedStep:
    """Dropout, checkpointed blocks, clipping by the global norm, a schedule."""
    model, tokens = _Model(), jnp.zeros((8, 6), jnp.int32)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-3, 100)))

    def step(params: Any, state: Any, tokens: Any, key: Any) -> Any:
        def loss_of(params: Any) -> Any:
            logits: Any = model.apply(params, tokens, rngs={"dropout": key})
            return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()

        loss, gradients = jax.value_and_grad(loss_of)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    keys = {name: jax.random.key(0) for name in ("params", "dropout")}
    params = jax.eval_shape(lambda: model.init(keys, tokens))
    return _traced(step, params, jax.eval_shape(optimizer.init, params), tokens, jax.random.key(0))


@jax.custom_jvp
def _own(x: Any) -> Any:
    return jnp.sin(x)


_own.defjvp(lambda primals, tangents: (_own(*primals), tangents[0] * jnp.cos(primals[0])))


def _scanned() -> TracedStep:
    """Layers in a loop, with a branch, a function of the user's, a captured table and a callback."""
    table = np.random.default_rng(0).normal(size=(64, 16)).astype(np.float32)

    def step(params: Any, batch: Any) -> Any:
        def loss_of(params: Any) -> Any:
            def layer(h: Any, w: Any) -> Any:
                h = jax.lax.cond(w[0, 0] > 0, jnp.tanh, _own, h @ w)
                return h, jnp.max(h)

            h, largest = jax.lax.scan(jax.checkpoint(layer), jnp.asarray(table)[batch["at"]], params)
            jax.debug.callback(lambda x: None, largest)
            return jnp.mean((jax.nn.gelu(h) - batch["y"]) ** 2)

        loss, gradients = jax.value_and_grad(loss_of)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss

    batch = {"at": np.zeros(8, np.int32), "y": np.zeros((8, 16), np.float32)}
    return _traced(step, np.zeros((4, 16, 16), np.float32), batch)


def _fused() -> TracedStep:
    """Attention as one operator."""

    def step(w: Any, x: Any) -> Any:
        def loss_of(w: Any) -> Any:
            q, k, v = (jnp.einsum("btd,dhk->bthk", x, w[i]) for i in range(3))
            return jnp.mean(autopar.dot_product_attention(q, k, v, is_causal=True) ** 2)

        return w - 0.1 * jax.grad(loss_of)(w)

    return _traced(step, np.zeros((3, 16, 2, 8), np.float32), np.zeros((8, 8, 16), np.float32))


def _small() -> TracedStep:
    state = jax.eval_shape(small_steps.init, jax.random.key(0))
    return _traced(small_steps.train_step, small_steps.shapes_of(state), small_steps.batch_of())


def _traced(step: Callable[..., Any], *arguments: Any) -> TracedStep:
    return autopar.parallelize(step).trace(*arguments).step


def _partitioned() -> TracedStep:
    """A function whose sharding rule is the user's."""

    @custom_partitioning
    def scaled(x: Any) -> Any:
        return 2.0 * x

    def partition(mesh: Any, arguments: Any, result: Any) -> Any:
        return mesh, lambda x: 2.0 * x, result.sharding, (arguments[0].sharding,)

    scaled.def_partition(partition=partition, sharding_rule="i j -> i j")
    return _traced(
        lambda w, x: (w + 0.1, scaled(x @ w).sum(1)), np.zeros((16, 16), np.float32), np.zeros((8, 16), np.float32)
    )


STEPS = {"small": _small, "flax": _flax, "scanned": _scanned, "fused": _fused, "partitioned": _partitioned}


@pytest.mark.slow
def test_another_program_makes_the_same_plans(folder: pathlib.Path) -> None:
    cluster = autopar.load_preset("dgx-h100", num_hosts=2, devices_per_host=2)
    made, wanted = [], []
    for what in STEPS.values():
        step = what()
        entry = plan_cache.entry_of(step, cluster, AUTO)
        assert entry is not None
        made.append((entry, step.search(cluster, AUTO)[0]))
        wanted.append((plans_ahead._without_constants(step), AUTO, entry.path, cluster))
    payload = plans_ahead._pickled(wanted)
    script = (
        "import pickle, sys; from autopar.planning import plans_ahead\n"
        "for each in pickle.load(sys.stdin.buffer): plans_ahead._make(*each)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], input=payload, env={**environment(1), "PYTHONHASHSEED": "3"},
        capture_output=True, timeout=LIMIT, check=True,
    )  # fmt: skip
    for entry, plan in made:
        kept = entry.read()
        assert kept is not None, done.stderr.decode()
        assert kept == plan
    assert done.stderr.decode().count("a plan for 4 devices is made ahead of a start with so many") == len(STEPS)


def _wait_for(count: int, folder: pathlib.Path) -> None:
    """Until the folder has so many plans."""
    until = time.monotonic() + LIMIT
    while len(list(folder.glob("*.json"))) < count:
        assert time.monotonic() < until
        time.sleep(0.1)


def test_a_step_that_is_compiled_is_planned_for_the_next_start(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ELASTIC, "1:2")
    monkeypatch.setenv(LAUNCHED, "1")
    state = small_steps.shapes_of(jax.eval_shape(small_steps.init, jax.random.key(0)))
    arguments = state, small_steps.batch_of(2 * jax.device_count())
    step = autopar.parallelize(small_steps.train_step, method=autopar.recipes.zero(2))
    step.compile(*arguments)
    _wait_for(2, folder)
    (larger,) = plans_ahead.other_clusters(jax.devices(), 1, 2)
    assert larger.num_devices == 2 * jax.device_count()

    def search(*_: Any, **__: Any) -> Any:
        raise AssertionError("it is planned again")

    monkeypatch.setattr(TracedStep, "search", search)
    kept = step.plan(*arguments, cluster=larger)
    monkeypatch.undo()
    assert step.plan(*arguments, cluster=larger) == kept


@pytest.mark.parametrize("options", [{"cluster": autopar.load_preset("cpu", devices_per_host=8)}, {"devices": True}])
def test_where_the_devices_are_given_there_are_no_others(
    options: dict[str, Any], folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ELASTIC, "1:2")
    monkeypatch.setattr(plans_ahead, "other_clusters", lambda *_: pytest.fail("it plans ahead"))
    given = {"devices": jax.devices()[:2]} if "devices" in options else options
    arguments = small_steps.shapes_of(jax.eval_shape(small_steps.init, jax.random.key(0))), small_steps.batch_of()
    step = autopar.parallelize(small_steps.train_step, method=autopar.recipes.zero(2), **given)
    step.compile(*arguments)
    plan = autopar.parallelize(small_steps.train_step, method=autopar.recipes.zero(2)).plan(*arguments)
    autopar.parallelize(small_steps.train_step, method=plan).compile(*arguments)


def _as_another_program(payload: bytes, job: int) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-c", f"from autopar.planning.plans_ahead import main; main({job})"]
    return subprocess.run(command, input=payload, env=environment(1), capture_output=True, timeout=LIMIT, check=True)


def test_it_ends_with_the_job() -> None:
    done = _as_another_program(b"", job=1)  # which is not what has started it
    assert done.returncode == 0 and b"Traceback" not in done.stderr


def test_what_does_not_arrive_is_said_in_a_line() -> None:
    payload = pickle.dumps(_small).replace(b"test_plans_ahead", b"test_plans_aheam")
    said = _as_another_program(payload, job=os.getpid()).stderr.decode()
    assert "plans for fewer or more devices are not made ahead: ModuleNotFoundError" in said
    assert "Traceback" not in said


def test_what_cannot_be_handed_on_is_said(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ELASTIC, "1:2")
    monkeypatch.setattr(plans_ahead, "_pickled", lambda _: (_ for _ in ()).throw(TypeError("cannot pickle a lock")))
    with pytest.warns(UserWarning, match="train_step: plans for fewer or more devices are not made ahead, .* a lock"):
        plans_ahead.make_ahead(_small(), AUTO, jax.devices())
