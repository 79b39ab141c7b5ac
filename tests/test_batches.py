"""Batches of any iterator on the devices: what arrives, which part a process reads, and where it goes on."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.errors import BatchAxisError, PlanError, PlanMismatchError, StateError
from autopar.ir.graph import BatchDim
from autopar.runtime.feeding import DataShard, Rows, place_rows, rows_of
from autopar.runtime.placement import Array
from tests.planned import cluster_of

WIDTH = 16


def train_step(state: Any, batch: Any, rate: Any) -> Any:
    def loss_of(params: Any) -> Any:
        hidden = jnp.tanh(batch["x"] @ params["a"])
        return ((hidden @ params["b"] - batch["y"]) ** 2).mean()

    loss, gradients = jax.value_and_grad(loss_of)(state["params"])
    return {"params": jax.tree.map(lambda p, g: p - rate * g, state["params"], gradients)}, loss


def initial() -> Any:
    numbers = np.random.default_rng(0)
    return {"params": {name: numbers.normal(size=(WIDTH, WIDTH)).astype(np.float32) for name in "ab"}}


def batches(count: int) -> Iterator[Any]:
    for k in range(count):
        numbers = np.random.default_rng(k)
        yield {name: numbers.normal(size=(8, WIDTH)).astype(np.float32) for name in "xy"}


def compiled(method: Any) -> autopar.Parallelized:
    step = autopar.parallelize(train_step, cluster=cluster_of(1, 4), devices=jax.devices()[:4], method=method)
    step.compile(initial(), next(batches(1)), 0.1)
    return step


METHODS: dict[str, Any] = {
    "zero3": autopar.recipes.zero(3, 2), "gpipe": autopar.recipes.gpipe(2, 2),
    "tensor": autopar.recipes.megatron(1, 4, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_steps_on_placed_batches_are_those_on_the_iterator_s(name: str) -> None:
    step = compiled(METHODS[name])
    state, other = initial(), initial()
    for placed, given in zip(step.batches(batches(4)), batches(4), strict=True):
        assert placed["x"].shape == (8, WIDTH) and placed["x"].ndim == 2
        other, expected = step(other, given, 0.1)
        state, loss = step(state, placed, 0.1)
        assert loss == expected
        step(state, placed, 0.1)  # the same batch may be used again
        state, other = autopar.gather(other), autopar.gather(other)
    assert len(step._executables) == 1


def test_a_loop_over_placed_batches_is_steady() -> None:
    step = autopar.parallelize(
        lambda state, batch: train_step(state, batch, 0.1), cluster=cluster_of(1, 4), devices=jax.devices()[:4]
    )
    state = initial()
    step.compile(state, next(batches(1)))
    for batch in step.batches(batches(4)):
        state, _ = step(state, batch)
    assert step._steady is not None


def test_several_arguments_of_examples() -> None:
    def fun(state: Any, x: Any, rate: Any, y: Any) -> Any:
        return train_step(state, {"x": x, "y": y}, rate)

    step = autopar.parallelize(fun, cluster=cluster_of(1, 4), devices=jax.devices()[:4])
    first = next(batches(1))
    step.compile(initial(), first["x"], 0.1, first["y"])
    expected = jax.jit(fun)(initial(), first["x"], 0.1, first["y"])[1]
    for x, y in step.batches([(b["x"], b["y"]) for b in batches(1)]):
        assert np.allclose(step(initial(), x, 0.1, y)[1], expected)
    with pytest.raises(PlanMismatchError, match="takes 2 arguments of examples, the iterator gives 1"):
        next(step.batches([(first["x"],)]))


def test_what_is_refused() -> None:
    step = autopar.parallelize(train_step, cluster=cluster_of(1, 4), devices=jax.devices()[:4])
    with pytest.raises(PlanError, match="batches: train_step has no plan yet"):
        step.batches(batches(1))
    step = compiled(METHODS["zero3"])
    (first,) = batches(1)
    for wrong, message in (
        ({"x": first["x"]}, "compiled for examples of structure"),
        (
            {"x": first["x"][:7], "y": first["y"][:7]},
            r"\['x'\] of float32\[8, 16\]; the iterator gives float32\[7",
        ),
        ({"x": first["x"].astype(np.int32), "y": first["y"]}, r"the iterator gives int32\[8, 16\]"),
    ):
        with pytest.raises(PlanMismatchError, match=message):
            next(step.batches([wrong]))
    other = compiled(METHODS["gpipe"])
    placed = next(step.batches([first]))
    with pytest.raises(StateError, match=r"batch\['x'\] was placed on the devices for train_step.*its own batches"):
        other(initial(), placed, 0.1)
    with pytest.raises(TypeError, match="was placed on the devices for train_step"):
        np.asarray(placed["x"])
    mixed = autopar.parallelize(
        lambda state, both: train_step(state, both["batch"], both["rate"]),
        batch_axes=(None, {"batch": 0, "rate": None}), cluster=cluster_of(1, 4), devices=jax.devices()[:4],
    )  # fmt: skip
    mixed.compile(initial(), {"batch": first, "rate": 0.1})
    with pytest.raises(BatchAxisError, match="in an argument with other leaves, or by name"):
        mixed.batches([first])


def test_errors_of_the_iterator_reach_the_loop() -> None:
    def broken() -> Iterator[Any]:
        yield from batches(2)
        raise FileNotFoundError("part 3")

    taken: list[Any] = []
    with pytest.raises(FileNotFoundError, match="part 3"):
        taken.extend(compiled(METHODS["zero3"]).batches(broken()))


class Loader:
    """As PyTorch's loaders that can tell their position: not their iterators do."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        for k in range(self.at, 10):
            self.at = k + 1
            yield next(batches(1)) if k == 0 else list(batches(k + 1))[k]

    def state_dict(self) -> Any:
        return {"at": self.at}

    def load_state_dict(self, state: Any) -> None:
        self.at = state["at"]


def test_positions_of_loaders() -> None:
    step = compiled(METHODS["zero3"])
    taken = step.batches(Loader())
    _, second = next(taken), next(taken)
    assert second["x"].shape == (8, WIDTH)
    again = step.batches(Loader())
    again.set_state(taken.get_state())
    assert step(initial(), next(again), 0.1)[1] == step(initial(), list(batches(3))[2], 0.1)[1]
    short = step.batches(batches(1))
    with pytest.raises(StateError, match="2 were taken, but the iterator gives only 1"):
        short.set_state(taken.get_state())


def test_leaves_that_nobody_reads_and_those_that_come_back() -> None:
    def fun(state: Any, batch: Any) -> Any:
        return train_step(state, batch, 0.1)

    step = autopar.parallelize(fun, cluster=cluster_of(1, 4), devices=jax.devices()[:4])
    given = {**next(batches(1)), "id": np.arange(8, dtype=np.int32)}
    step.compile(initial(), given)
    assert np.isfinite(step(initial(), next(step.batches([{**given, "id": np.arange(3)}])))[1])
    back = autopar.parallelize(
        lambda state, batch: (*fun(state, batch), batch["id"]), cluster=cluster_of(1, 4), devices=jax.devices()[:4]
    )
    back.compile(initial(), given)
    with pytest.raises(BatchAxisError, match=r"returns or prints batch\['id'\] as it is"):
        back.batches([given])


class Positioned(Iterator[Any]):
    """As Grain's iterators: the position can be told and set."""

    def __init__(self) -> None:
        self.at, self.reads = 0, 0

    def __next__(self) -> Any:
        self.at, self.reads = self.at + 1, self.reads + 1
        return {name: np.full((8, WIDTH), self.at, np.float32) for name in "xy"}

    def get_state(self) -> bytes:
        return str(self.at).encode()

    def set_state(self, state: bytes) -> None:
        self.at = int(state)


@pytest.mark.parametrize("tells", [True, False])
def test_the_position_is_part_of_a_checkpoint(tmp_path: pathlib.Path, tells: bool) -> None:
    step = compiled(METHODS["zero3"])
    given = Positioned() if tells else batches(10)
    taken = step.batches(given)
    state = initial()
    for _ in range(3):
        state, _ = step(state, next(taken), 0.1)
    assert taken.get_state()["count"] == 3  # one more is read already
    autopar.save(tmp_path, state, step=3, batches=taken)
    fourth = step(state, next(taken), 0.1)
    source = Positioned() if tells else batches(10)
    again = step.batches(source)
    state = autopar.restore(tmp_path, like=step, batches=again)
    assert not isinstance(source, Positioned) or source.reads == 0
    assert step(state, next(again), 0.1)[1] == fourth[1]
    assert again.get_state()["count"] == 4
    with pytest.raises(StateError, match="before the first batch is taken"):
        again.set_state(again.get_state())
    autopar.save(tmp_path, fourth[0], step=4)
    with pytest.raises(autopar.UserError, match="holds no position of batches"):
        autopar.restore(tmp_path, like=step, batches=step.batches(batches(1)))


def pairs() -> list[dict[str, Any]]:
    numbers = np.random.default_rng(0).normal(size=(64, 2, WIDTH)).astype(np.float32)
    return [{"x": x, "y": y} for x, y in numbers]


def grain_dataset() -> Any:
    shuffled = grain.MapDataset.source(pairs()).seed(3).shuffle().repeat(2)
    return shuffled.batch(8, drop_remainder=True).to_iter_dataset(grain.ReadOptions(num_threads=2))


def grain_loader() -> Any:
    sampler = grain.samplers.IndexSampler(
        64, shuffle=True, seed=3, num_epochs=2, shard_options=grain.sharding.NoSharding()
    )
    batch = grain.transforms.Batch(8, drop_remainder=True)
    return grain.DataLoader(data_source=pairs(), sampler=sampler, operations=[batch], worker_count=0)


@pytest.mark.parametrize("source", [grain_dataset, grain_loader])
def test_grain_goes_on_where_it_was(tmp_path: pathlib.Path, source: Any) -> None:
    step = compiled(METHODS["zero3"])
    taken, state, expected = step.batches(source()), initial(), []
    for at, batch in enumerate(taken, 1):
        state, loss = step(state, batch, 0.1)
        expected.append(loss)
        if at == 5:
            autopar.save(tmp_path, state, step=at, batches=taken)
    again = step.batches(source())
    state, found = autopar.restore(tmp_path, like=step, batches=again), []
    for batch in again:
        state, loss = step(state, batch, 0.1)
        found.append(loss)
    assert len(found) == 11 and found == expected[5:]


def test_grain_goes_on_with_batches_of_another_size() -> None:
    """As docs/how-to/follow-the-devices.md says of it."""

    def rows(size: int) -> Any:
        return grain.MapDataset.range(64).shuffle(seed=3).repeat(2).to_iter_dataset().batch(size)

    first, second = iter(rows(8)), iter(rows(5))
    taken = [*next(first), *next(first)]
    second.set_state(first.get_state())
    taken += [*next(second), *next(second)]
    assert taken == [*next(iter(rows(26)))]


def test_who_needs_what() -> None:
    step = compiled(METHODS["zero3"])
    found = list(step.batches(batches(3)))
    assert len(found) == 3 and step.data_shard == (0, 1)
    (args, kwargs) = step.compile(initial(), next(batches(1)), 0.1).input_shardings
    assert kwargs == {} and len(args) == 3
    assert args[0]["params"]["a"][0].mesh == args[1]["x"][0].mesh


class _OfProcess:
    """A device."""

    def __init__(self, process: int) -> None:
        self.process_index = process


class _Sharding:
    """Of two devices of each of two processes: the rows that each holds."""

    def __init__(self, cuts: Any) -> None:
        self.index_of = {_OfProcess(k // 2): (slice(*cut), slice(None)) for k, cut in enumerate(cuts)}

    def devices_indices_map(self, _: Any) -> Any:
        return self.index_of


def test_rows_of_a_process() -> None:
    def rows(cuts: Any, microbatches: int, process: int) -> Any:
        sharding: Any = _Sharding(cuts)
        array = Array((8 // microbatches, 3), np.dtype(np.float32), sharding)
        feeds = {m: (0, BatchDim(0, 1, 8, 1), m, array) for m in range(microbatches)}
        shard, numbers = rows_of(feeds, process)
        return shard, numbers.tolist()

    quarters = ((0, 1), (1, 2), (2, 3), (3, 4))  # of microbatches of 4
    assert rows(quarters, 2, 0) == ((0, 2), [0, 1, 4, 5])
    assert rows(quarters, 2, 1) == ((1, 2), [2, 3, 6, 7])
    assert rows(((0, 4), (4, 8), (0, 4), (4, 8)), 1, 1) == ((0, 1), list(range(8)))  # both need all
    assert rows(((None, None),) * 4, 1, 1) == ((0, 1), list(range(8)))
    assert rows(((0, 2), (0, 2), (2, 8), (2, 8)), 1, 1) == ((0, 1), list(range(8)))  # unequal parts
    assert rows(((0, 4), (0, 4), (4, 8), (4, 8)), 1, 7) == ((0, 2), [0, 1, 2, 3])  # takes nothing


def test_microbatches_of_the_whole_and_of_a_part() -> None:
    """Of a part, examples are counted as they come in it: here one comes before those that the devices hold."""
    step = compiled(METHODS["zero3"])
    runtime = next(iter(step._executables.values()))._worker
    feeds, count = runtime.wiring.feeds, runtime.wiring.num_microbatches
    assert count == 2
    whole = {at: np.random.default_rng(at).normal(size=(8, WIDTH)).astype(np.float32) for at, _, _, _ in feeds.values()}
    part = {at: np.concatenate([np.zeros((1, WIDTH), np.float32), leaf]) for at, leaf in whole.items()}
    for given, rows in ((whole, runtime.rows), (part, Rows(DataShard(0, 2), np.arange(-1, 8)))):
        found = place_rows(given, feeds, rows)
        for register, (at, batch, microbatch, _) in feeds.items():
            size = batch.size // count
            assert np.array_equal(found[register], whole[at][microbatch * size : (microbatch + 1) * size])


def test_input_shardings_of_pieces() -> None:
    def scanned(stack: Any, x: Any) -> Any:
        loss, gradient = jax.value_and_grad(
            lambda s: jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, s)[0].mean()
        )(stack)
        return stack - 0.1 * gradient, loss

    step = autopar.parallelize(
        scanned, cluster=cluster_of(1, 4), devices=jax.devices()[:4], method=autopar.recipes.gpipe(2, 2)
    )
    executable = step.compile(jnp.ones((4, WIDTH, WIDTH)), np.ones((8, WIDTH), np.float32))
    (stack, x), _ = executable.input_shardings
    devices = [[device.id for device in sharding.mesh.devices] for sharding in stack]
    assert devices == [[0, 1], [2, 3]]  # a piece on each stage
    assert [[device.id for device in sharding.mesh.devices] for sharding in x] == [[0, 1]]
