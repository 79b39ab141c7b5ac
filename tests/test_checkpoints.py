"""Checkpoints of one process: what comes back, what is refused, and what is done about damage."""

from __future__ import annotations

import os
import pathlib
import platform
import subprocess
import sys
import zipfile
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import autopar
from autopar.checkpointing import checkpoints
from autopar.errors import CheckpointError, PlanError, StateError
from autopar.ir.graph import LeafCut
from autopar.ir.pieces import Pieces
from tests.planned import cluster_of


class State(NamedTuple):
    params: Any
    count: Any
    key: jax.Array
    apply: Any


def forward(params: Any, x: Any) -> Any:
    return jnp.tanh(x @ params["a"]) @ params["b"]


def train_step(state: State, batch: jax.Array) -> Any:
    key, noise = jax.random.split(state.key)

    def loss_of(params: Any) -> Any:
        return (state.apply(params, batch) ** 2).mean() + 0 * jax.random.normal(noise)

    loss, gradients = jax.value_and_grad(loss_of)(state.params)
    params = jax.tree.map(lambda p, g: p - 0.1 * g, state.params, gradients)
    return State(params, state.count + 1, key, state.apply), loss


def initial(width: int = 16) -> State:
    a, b = (np.random.default_rng(k).normal(size=(width, width)).astype(np.float32) for k in range(2))
    return State({"a": a, "b": b}, 0, jax.random.key(1), forward)


BATCH = np.ones((8, 16), np.float32)


def parallelized(**options: Any) -> autopar.Parallelized:
    cluster = cluster_of(1, 4)
    return autopar.parallelize(
        train_step, cluster=cluster, devices=jax.devices()[:4], static_leaves=callable, **options
    )


def equal(x: Any, y: Any) -> None:
    xs, ys = (jax.tree.leaves(autopar.gather(tree)) for tree in (x, y))
    for a, b in zip(xs, ys, strict=True):
        if isinstance(a, jax.Array) and jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert a is b or np.array_equal(a, b)


def test_training_goes_on_under_another_plan(tmp_path: pathlib.Path) -> None:
    step = parallelized(method=autopar.recipes.zero(3))
    state, _ = step(initial(), BATCH)
    assert autopar.save(tmp_path, state, step=1)
    expected, loss = step(state, BATCH)  # while it is written; the state is given away
    other = parallelized(method=autopar.recipes.gpipe(2, 2))
    executable = other.compile(initial(), BATCH)
    for like in (other, executable):
        state = autopar.restore(tmp_path, like=like)
        assert state.apply is forward
        assert state.count.weak_type
        found, found_loss = other(state, BATCH)
        assert len(other._executables) == 1
        np.testing.assert_allclose(found_loss, loss, rtol=1e-6)
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5),
            autopar.gather(found.params), autopar.gather(expected.params),
        )  # fmt: skip


def test_a_checkpoint_of_version_0_1_is_restored(tmp_path: pathlib.Path) -> None:
    """Which names a handler of Orbax that is not there any more."""
    with zipfile.ZipFile(pathlib.Path(__file__).parent / "data" / "checkpoint_0.1.zip") as file:
        file.extractall(tmp_path)
    assert "autopar.checkpoints._StateHandler" in (tmp_path / "3" / "_CHECKPOINT_METADATA").read_text()
    expected = {
        "weights": np.arange(8, dtype=np.float32).reshape(2, 4), "pieces": np.arange(4, dtype=np.float32),
        "bfloat16": jnp.arange(3, dtype=jnp.bfloat16), "key": jax.random.key(2), "count": 7, "rate": jnp.asarray(0.5),
        "text": "run 7",
    }  # fmt: skip
    assert autopar.latest_step(tmp_path) == 3
    equal(autopar.restore(tmp_path, like=expected), expected)


def test_kinds_of_leaves(tmp_path: pathlib.Path) -> None:
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    sharding = jax.sharding.NamedSharding(mesh, jax.P(None, "x"))
    cut = LeafCut(0, (0, 1, 4))
    pieces = [jax.device_put(np.arange(4.0)[a:b], jax.devices()[k]) for k, (a, b) in enumerate(cut.windows)]
    tree = {
        "sharded": jax.device_put(np.arange(8, dtype=np.int8).reshape(2, 4), sharding),
        "bfloat16": jnp.arange(3, dtype=jnp.bfloat16),
        "empty": jnp.zeros((0, 3)),
        "keys": jax.random.split(jax.random.key(2, impl="rbg"), 3),
        "pieces": Pieces(tuple(pieces), cut),
        "numpy": np.arange(3, dtype=np.float64),
        "number": 2**40, "real": 0.1, "flag": True, "text": "run 7", "scalar": np.float32(3), "weak": jnp.asarray(2.0),
        "done": np.bool_(True), "complex": 1 + 2j,
        "nothing": None, "none": (), "function": forward, "nested": [(1, {"x": 2})],
    }  # fmt: skip
    autopar.save(tmp_path / "new" / "folder", tree, step=3)
    found = autopar.restore(tmp_path / "new" / "folder", like=tree)
    structures: list[Any] = [jax.tree.structure(x) for x in (found, tree)]
    assert structures[0] == structures[1]
    equal(found, tree)
    assert found["sharded"].sharding == sharding and found["weak"].weak_type and found["function"] is forward
    assert [x.devices() for x in found["pieces"].pieces] == [x.devices() for x in tree["pieces"].pieces]
    for name in ("numpy", "number", "real", "flag", "text", "scalar", "done", "complex"):
        assert type(found[name]) is type(tree[name])
    # As something else: whole, in other types of arrays.
    whole = autopar.restore(
        tmp_path / "new" / "folder",
        like={**tree, "pieces": jax.ShapeDtypeStruct((4,), np.float32), "sharded": np.zeros(0)},
    )
    assert np.array_equal(whole["pieces"], [0, 1, 2, 3]) and isinstance(whole["sharded"], np.ndarray)


def test_orbax_reads_it(tmp_path: pathlib.Path) -> None:
    state, _ = parallelized(method=autopar.recipes.zero(3))(initial(), BATCH)
    autopar.save(tmp_path, state, step=1)
    autopar.restore(tmp_path, like=state)
    plain = ocp.PyTreeCheckpointer().restore(tmp_path / "1" / "state")
    assert sorted(plain) == ["apply", "count", "key", "params"] and plain["apply"] is None
    equal(plain["params"], state.params)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    sharding = jax.sharding.NamedSharding(mesh, jax.P("x"))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), plain["params"])
    arrays = ocp.PyTreeCheckpointer().restore(
        tmp_path / "1" / "state",
        args=ocp.args.PyTreeRestore(
            {"params": shapes}, restore_args={"params": ocp.checkpoint_utils.construct_restore_args(shapes)},
            partial_restore=True,
        ),
    )  # fmt: skip
    equal(arrays["params"], state.params)
    assert arrays["params"]["a"].sharding == sharding


def test_what_the_manager_keeps(tmp_path: pathlib.Path) -> None:
    options = ocp.CheckpointManagerOptions(max_to_keep=2, save_interval_steps=2)
    saved = [autopar.save(tmp_path, {"x": jnp.asarray(k)}, step=k, options=options) for k in range(7)]
    assert saved == [True, False] * 3 + [True]
    assert autopar.restore(tmp_path, like={"x": 0})["x"] == 6
    assert autopar.restore(tmp_path, like={"x": 0}, step=4)["x"] == 4
    with pytest.raises(CheckpointError, match=r"no complete checkpoint of step 2; there are those of steps 4, 6"):
        autopar.restore(tmp_path, like={"x": 0}, step=2)
    with pytest.raises(CheckpointError, match=r"step=6.* holds a checkpoint of step 6 already"):
        autopar.save(tmp_path, {"x": 0}, step=6)
    with pytest.raises(CheckpointError, match="is open with options="):
        autopar.save(tmp_path, {"x": 0}, step=8, options=ocp.CheckpointManagerOptions(max_to_keep=3))


def test_the_latest_step(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "run"
    assert autopar.latest_step(folder) is None and not folder.exists()
    folder.mkdir()
    assert autopar.latest_step(folder) is None
    autopar.save(folder, {"x": jnp.asarray(0)}, step=3)
    assert autopar.latest_step(folder) == 3
    (folder / "3" / "commit_success.txt").rename(folder / "3" / "other")  # whichever way the storage tells it
    (folder / "3").rename(folder / "3.orbax-checkpoint-tmp")
    assert autopar.latest_step(folder) is None


def test_all_are_waited_for_though_one_fails(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []
    for name in "abc":
        autopar.save(tmp_path / name, {"x": jnp.asarray(0)}, step=0)
    autopar.wait_until_saved()
    for name in "abc":
        manager = checkpoints._open[str(tmp_path / name)].manager

        def wait(name: str = name) -> None:
            waited.append(name)
            if name != "c":
                raise OSError(name)

        monkeypatch.setattr(manager, "wait_until_finished", wait)
    with pytest.raises(OSError, match="a"):
        autopar.wait_until_saved()
    assert waited == ["a", "b", "c"]


def test_options_may_be_given_after_a_first_restore(tmp_path: pathlib.Path) -> None:
    autopar.save(tmp_path, {"x": jnp.asarray(0)}, step=0)
    autopar.restore(tmp_path, like={"x": 0})
    options = ocp.CheckpointManagerOptions(max_to_keep=1)
    for k in (1, 2):
        autopar.save(tmp_path, {"x": jnp.asarray(k)}, step=k, options=options)
    autopar.restore(tmp_path, like={"x": 0})
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.isdigit()] == ["2"]


def test_the_best(tmp_path: pathlib.Path) -> None:
    for k, loss in enumerate([3.0, 1.0, 2.0]):
        options = ocp.CheckpointManagerOptions(max_to_keep=1, best_fn=lambda m: m["loss"], best_mode="min")
        autopar.save(tmp_path, {"x": jnp.asarray(k)}, step=k, metrics={"loss": loss}, options=options)
    assert autopar.restore(tmp_path, like={"x": 0})["x"] == 1


def test_what_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(CheckpointError, match="holds no complete checkpoint; there is none"):
        autopar.restore(tmp_path, like={"x": 0})
    with pytest.raises(CheckpointError, match=r"restore: there is no folder .*typo"):
        autopar.restore(tmp_path / "typo", like={"x": 0})
    assert not (tmp_path / "typo").exists()
    step = parallelized(method=autopar.recipes.zero(3))
    with pytest.raises(PlanError, match="restore: train_step has no plan yet"):
        autopar.restore(tmp_path, like=step)
    state, _ = step(initial(), BATCH)
    autopar.save(tmp_path, state, step=1)
    step(state, BATCH)
    with pytest.raises(StateError, match=r"state\.params\['a'\] was donated to a step and is gone"):
        autopar.save(tmp_path, state, step=2)
    wide = parallelized(method=autopar.recipes.zero(3))
    wide.compile(initial(32), np.ones((8, 32), np.float32))
    with pytest.raises(CheckpointError, match=r"a is float32\[16, 16\], but float32\[32, 32\] is wanted; params/b"):
        autopar.restore(tmp_path, like=wide)
    with pytest.raises(CheckpointError, match=r"count is there, but not wanted; key is there.*params/c is not there"):
        autopar.restore(tmp_path, like={"params": {"a": np.zeros(0), "b": np.zeros(0), "c": np.zeros(0)}})


def test_steps_called_by_name(tmp_path: pathlib.Path) -> None:
    step = parallelized(method=autopar.recipes.zero(3))
    step.compile(state=initial(), batch=BATCH)
    state, _ = step(state=initial(), batch=BATCH)
    autopar.save(tmp_path, state, step=1)
    equal(autopar.restore(tmp_path, like=step).params, state.params)
    with pytest.raises(CheckpointError, match="other names than their numbers"):
        autopar.save(tmp_path / "x", state, step=1, options=ocp.CheckpointManagerOptions(step_prefix="at"))


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def test_damage_to_any_file_is_found(tmp_path: pathlib.Path) -> None:
    tree = {"x": jnp.arange(10_000.0), "y": jnp.ones(3), "name": "run"}
    autopar.save(tmp_path, tree, step=1)
    autopar.restore(tmp_path, like=tree)
    files = [file for file in _files(tmp_path / "1" / "state") if file.name != "commit_success.txt"]
    assert len(files) > 5
    numbers = np.random.default_rng(0)
    for file in files:
        content = file.read_bytes()
        flipped = bytearray(content)
        flipped[numbers.integers(len(content))] ^= 1 << int(numbers.integers(8))
        for damaged in (bytes(flipped), content[: len(content) // 2], None):
            file.unlink() if damaged is None else file.write_bytes(damaged)
            gone = damaged is None and file.name.startswith("checksums")
            with pytest.raises(CheckpointError, match="has no list of checksums" if gone else "is damaged"):
                autopar.restore(tmp_path, like=tree, step=1)
        file.write_bytes(content)
    equal(autopar.restore(tmp_path, like=tree, step=1), tree)


def test_the_one_before_a_damaged_one_is_taken_and_steps_go_on(tmp_path: pathlib.Path) -> None:
    for step in (1, 2, 3):
        autopar.save(tmp_path, {"x": jnp.full(3, step)}, step=step)
    assert autopar.restore(tmp_path, like={"x": np.zeros(0)})["x"][0] == 3
    for step in (2, 3):
        for file in _files(tmp_path / str(step) / "state" / "ocdbt.process_0"):
            file.write_bytes(b"?")
    with pytest.warns(UserWarning, match=r"is damaged: .* has 1 bytes, where .* set aside as damaged\.") as said:
        found = autopar.restore(tmp_path, like={"x": np.zeros(0)})
    assert len(said) == 2 and found["x"][0] == 1
    assert autopar.save(tmp_path, {"x": jnp.full(3, 2)}, step=2)
    assert autopar.restore(tmp_path, like={"x": np.zeros(0)})["x"][0] == 2


SCRIPT = """
import os, sys, resource, signal
import jax.numpy as jnp, autopar
for step in (1, 2, 3):
    if step == 3 and sys.argv[2] == "full":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))  # of a file, as if the disk were full
    autopar.save(sys.argv[1], {"x": jnp.arange(1e6) * step}, step=step)
    if step == 2:
        autopar.restore(sys.argv[1], like={"x": jnp.zeros(1000000)})
if sys.argv[2] == "raises":
    raise ValueError("of the script")
if sys.argv[2] == "vanishes":
    autopar.wait_until_saved()
    os._exit(0)
"""


@pytest.mark.parametrize("what", ["ends", "vanishes", "raises", "full"])
def test_the_end_of_the_program_waits_for_it(tmp_path: pathlib.Path, what: str) -> None:
    arguments = [sys.executable, "-c", SCRIPT, str(tmp_path), what]
    done = subprocess.run(arguments, env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True)
    assert done.returncode == int(what in ("raises", "full")), done.stderr
    assert what != "full" or "File too large" in done.stderr
    last = 2 if what == "full" else 3
    assert autopar.restore(tmp_path, like={"x": np.zeros(0)})["x"][1] == last


def test_without_the_packages_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("checkpoints", "state_handler", "stored_leaves"):
        monkeypatch.delitem(sys.modules, f"autopar.checkpointing.{name}", raising=False)
        monkeypatch.delattr(f"autopar.checkpointing.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ModuleNotFoundError, match=r"autopar\.save needs orbax.*: pip install 'autopar\[checkpoint\]'"):
        _ = autopar.save


SAVES = """
import sys, time
import jax.numpy as jnp, autopar
from autopar.checkpointing import writers
if sys.argv[2] == "elsewhere":
    writers.platform.node = lambda: "another host"
for step in range(int(sys.argv[3]), 100):
    autopar.save(sys.argv[1], {"x": jnp.full(3, step)}, step=step)
    print(step, flush=True)
    if sys.argv[4] == "once" or not sys.stdin.readline():
        break
"""


def test_two_runs_in_one_folder_do_not_mix(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "run"

    def started(where: str, step: int, much: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", SAVES, os.fspath(folder), where, str(step), much]
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )  # fmt: skip

    with started("here", 1, "on") as first:
        assert first.stdin is not None and first.stdout is not None
        assert first.stdout.readline() == "1\n"
        with started("here", 2, "once") as second:
            _, said = second.communicate(timeout=120)
        assert second.returncode == 1
        assert f"save: process id {first.pid} on {platform.node()} writes its checkpoints into {folder}" in said
        first.stdin.write("go on\n")
        first.stdin.flush()
        assert first.stdout.readline() == "2\n"
        # Of another host nobody knows whether it runs: it takes over.
        with started("elsewhere", 3, "once") as third:
            assert third.communicate(timeout=120)[0] == "3\n"
        _, said = first.communicate("go on\n", timeout=120)
        assert first.returncode == 1 and f"process id {third.pid} on another host has begun to" in said
    with started("here", 4, "once") as fourth:  # nothing has to be cleaned up
        assert fourth.communicate(timeout=120)[0] == "4\n"
    assert autopar.latest_step(folder) == 4
