"""A machine measured: what a calibration holds, what it is fitted by, and what a plan makes of it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import pathlib
import resource
import types
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner
from jax.sharding import SingleDeviceSharding

import autopar
from autopar import recipes
from autopar.calibration import calibrator, machine, probes
from autopar.calibration.calibrator import _Calibrator
from autopar.calibration.machine import Machine, ProbeTask, pooled_by, products_of
from autopar.calibration.probe_steps import probe_steps
from autopar.calibration.probes import Clock, Probe, Ready, Timed
from autopar.calibration.step_factors import StepRun, slowed
from autopar.cli.main import main
from autopar.cost_model.collective import collective_time
from autopar.cost_model.compute import product_family
from autopar.cost_model.hardware import load_preset, make_cluster
from autopar.errors import ClusterError
from autopar.ir.mesh import Busy, Cluster, Host, Link, Patches, ProductSizes, ProductSpeed
from autopar.runtime.hlo_traffic import kernels_in_hlo
from autopar.stages import Options, trace
from tests.h100 import h100_devices, needs_cuda_compiler


@pytest.fixture(scope="module")
def found() -> autopar.Calibration:
    return autopar.calibrate(jax.devices()[:2], seconds=10)  # each kind of probe is made, however slow the machine is


@pytest.mark.slow
def test_a_calibration_is_a_cluster_that_plans_are_made_with(
    found: autopar.Calibration, tmp_path: pathlib.Path
) -> None:
    found.save(tmp_path / "mine.json")
    cluster = autopar.cluster_from_json(tmp_path / "mine.json")
    assert cluster == found.cluster

    def step(weights: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, gradient = jax.value_and_grad(lambda w: ((x @ w) ** 2).mean())(weights)
        return weights - gradient, loss

    plan = autopar.parallelize(step, cluster=cluster).plan(jnp.ones((256, 256)), jnp.ones((512, 256)))
    assert 0 < plan.step_time < 10


def test_everything_is_measured(found: autopar.Calibration) -> None:
    host = found.cluster.hosts[0]
    assert [each.num_devices for each in host.busy] == [1]
    for kind in (host.kind, host.busy[0].kind):
        assert {product_family(s.sizes, s.dtype) for s in kind.measured.products} >= {
            ("float32", False),
            ("float32", True),
        }
        assert kind.dispatch_overhead > kind.launch_overhead > 0
        assert kind.xla.single_output
        assert kind.measured.pooling["result"] > kind.measured.pooling["gradient"] > 0
        assert kind.measured.strided_reads
        assert [nbytes for nbytes, _ in kind.measured.bandwidths] == sorted(
            {nbytes for nbytes, _ in kind.measured.bandwidths}
        )
    assert {"memory", "collectives", "products"} <= set(found.errors())
    assert {each.num_devices for each in found.measurements} == {1, 2}


def test_a_calibration_says_how_well_the_model_fits(found: autopar.Calibration) -> None:
    text = str(found)
    for group, (count, median, _) in found.errors().items():
        errors = sorted(abs(m.predicted / m.seconds - 1) for m in found.measurements if m.group == group)
        assert len(errors) == count
        assert errors[(count - 1) // 2] - 1e-9 <= median <= errors[count // 2] + 1e-9
        assert f"{median:.1%}" in text
    assert len(json.loads(found.to_json())["measurements"]) == len(found.measurements)


def test_too_little_time_and_several_processes_are_refused() -> None:
    for seconds in (1.0, -5.0, math.nan, math.inf):
        with pytest.raises(ClusterError, match=r"seconds is .* at least 10; give it more"):
            autopar.calibrate(seconds=seconds)


def test_probes_compute_what_they_are_named_for() -> None:
    products = products_of(probes.linear("float32", 64, 32, 128, 3))
    assert sum(flops for *_, flops in products) == pytest.approx(12 * 64 * 32 * 128 * 3)
    assert {dtype for _, dtype, _ in products_of(probes.linear("bfloat16", 8, 8, 8, 1))} == {"bfloat16"}
    batched = products_of(probes.attention("float32", 4, 64, 16, 1))
    assert len(batched) == 6
    assert {sizes.batch for sizes, *_ in batched} == {4}
    for of in ("result", "image", "kernel"):
        ((sizes, _, flops),) = products_of(
            probes.convolution("float32", probes.ConvolutionSizes(2, 16, 8, 32, 3, 2), of, 1)
        )
        assert sizes.patches is not None
        assert 0.5 < flops / (2 * 2 * 8 * 8 * 8 * 32 * 9) <= 1.0  # windows at the border reach over it


def test_the_most_telling_products_come_first() -> None:
    """The largest, and then each time one than which none is farther from all that came before."""
    sizes = [(rows, width) for rows in (2, 8, 64, 4096) for width in (2, 16, 512)]
    found = calibrator._spread(sizes, None)
    assert sorted(found) == sorted(sizes)
    assert found[0] == (4096, 512)

    def distance(a: tuple[int, ...], b: tuple[int, ...]) -> float:
        return math.dist([math.log(x) for x in a], [math.log(x) for x in b])

    for k in range(1, len(found)):
        nearest = [min(distance(each, before) for before in found[:k]) for each in found[k:]]
        assert nearest[0] == pytest.approx(max(nearest))
    assert calibrator._spread(sizes, 3) == found[:3]


def test_a_short_calibration_of_a_gpu_knows_of_both_types_and_of_the_largest() -> None:
    cluster = load_preset("hgx-h200", devices_per_host=1)
    tasks = calibrator._in_turn(calibrator._Calibrator((jax.devices()[0],), cluster, 60.0, False)._tasks())
    groups = ("products", "batched products", "convolutions")
    first = {(task.group, task.dtype) for task in tasks[:10]}
    assert first == {
        *itertools.product(groups, ("bfloat16", "float32")), ("start of a program", ""), ("launches", ""),
        ("buffers", ""), ("memory", ""),
    }  # fmt: skip
    largest = [task for task in tasks if task.group == "products"][:2]
    assert [task.name for task in largest] == ["8192 x 4096 x 4096, bfloat16", "8192 x 4096 x 4096, float32"]
    assert all(task.times <= 256 for task in tasks)


@needs_cuda_compiler
@pytest.mark.parametrize("kind", probes.ELEMENTWISE)
def test_kernels_of_a_gpu_probe_are_those_that_are_counted(kind: str) -> None:
    """Each goes through memory by itself, and none waits for the turn of a loop."""
    probe, once = probes.elementwise(kind, 4096, 256, 8, looped=False)
    moved, launches = machine.traffic_of(once, load_preset("dgx-h100").hosts[0].kind)
    text = _for_an_h100(probe).as_text() or ""
    assert " while(" not in text
    kernels = kernels_in_hlo(text)
    assert sum(kernel.times for kernel in kernels) == 8 * launches
    assert sum(kernel.nbytes for kernel in kernels) == pytest.approx(8 * moved, rel=0.01)


def _for_an_h100(probe: Probe) -> jax.stages.Compiled:
    sharding = SingleDeviceSharding(h100_devices(1)[0])
    arrays = [jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding) for s in probe.shapes]
    donated = tuple(range(len(arrays))) if probe.in_place else ()
    return jax.jit(probe.function, donate_argnums=donated).lower(*arrays).compile()


class _Known(Machine):
    """Probes of which the seconds follow from a link."""

    def __init__(
        self, link: Link, payloads: Sequence[int] = (1 << 12, 1 << 16, 1 << 20, 1 << 24), unlike: float = 1.0
    ) -> None:
        """`unlike`: how many times as long as that gathers take, and all-to-alls as much shorter."""
        host = load_preset("cpu", devices_per_host=4).hosts[0]
        tasks = [
            ProbeTask("collectives", "", probes.launches(1), 4, size, payload, (kind,), times=3)
            for size in (2, 4)
            for payload in payloads
            for kind in ("all_reduce", "all_gather", "all_to_all")
        ]
        start = ProbeTask("start of a program", "", probes.launches(1), 4)
        launch = ProbeTask("launches", "", probes.launches(2), 4)
        cluster = make_cluster("", 1, 4, host.kind, link, link)
        times = {"all_reduce": 3.0, "all_gather": 3 * unlike, "all_to_all": 3 / unlike}
        seconds = {
            t: times[t.kinds[0]] * collective_time(cluster, range(t.size), t.kinds[0], t.payload) + 1e-4 for t in tasks
        }
        super().__init__({t: Timed.of((s,)) for t, s in {start: 1e-4, launch: 1e-4, **seconds}.items()}, host, 4)


def test_the_fit_finds_the_link_that_collectives_went_over() -> None:
    link = Link("known", 2e-5, 3e9)
    _, fitted = _Known(link).fitted(None)
    assert fitted.latency == pytest.approx(link.latency, rel=0.05)
    assert fitted.bandwidth == pytest.approx(link.bandwidth, rel=0.05)


def test_a_link_of_which_few_probes_tell_is_not_far_from_the_preset() -> None:
    """Small payloads say what latency and bandwidth are together, not apart."""
    preset = load_preset("cpu", devices_per_host=4).hosts[0].link
    link = Link("known", 3 * preset.latency, preset.bandwidth / 3)
    for unlike in (0.3, 3.0):
        _, fitted = _Known(link, payloads=(1 << 12,), unlike=unlike).fitted(None)
        assert preset.latency / 2 < fitted.latency < 10 * preset.latency
        assert preset.bandwidth / 12 < fitted.bandwidth < 10 * preset.bandwidth


class _Machines:
    """A clock and programs of a machine that is now fast and now slow."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.slower = 0.0, 1.0
        monkeypatch.setattr(probes, "time", types.SimpleNamespace(perf_counter=lambda: self.now))

    def ready(self, seconds: float) -> Ready:
        def run(*_: object) -> list[object]:
            self.now += self.slower * seconds
            return []

        return Ready(list, run, in_place=False)


def test_what_was_timed_while_the_machine_was_slower_is_normalised(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = _Machines(monkeypatch)
    monkeypatch.setattr(Clock, "compile", lambda clock, wanted: [machine.ready(0.002)])
    clock = Clock(jax.devices()[:2], 0.1, 64)
    fast = clock.time(machine.ready(0.01))
    machine.slower = 1.5
    slow = clock.time(machine.ready(0.01))
    assert (fast.seconds, fast.reference) == pytest.approx((0.01, 0.002))
    assert (slow.seconds, slow.least, slow.reference) == pytest.approx((0.015, 0.015, 0.003))
    assert clock.references == pytest.approx([0.002, 0.003])
    for reference in (0.002, 0.003):
        found = probes.typical([fast, slow], reference)
        assert (found.seconds, found.least) == pytest.approx((5 * reference, 5 * reference))


def test_several_timings_are_their_medians() -> None:
    timings = [Timed.of((2.0, 3.0, 9.0), 4.0, 1.0), Timed.of((10.0, 10.0), 6.0, 2.0), Timed.of((8.0, 8.0), 0.0, 1.0)]
    assert probes.typical(timings, 2.0) == Timed(10.0, 10.0, 4.0, 2.0)


def test_the_time_that_is_left_goes_to_measuring_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """First what was left out, then all in turn."""
    ticks = itertools.count()
    monkeypatch.setattr(calibrator, "time", types.SimpleNamespace(monotonic=lambda: 0.5 * next(ticks)))
    monkeypatch.setattr(calibrator, "run_steps", lambda *_: ([], 0))
    monkeypatch.setattr(calibrator, "_AT_ONCE", 1)
    monkeypatch.setattr(calibrator, "_RUN", 0.001)  # the clock that counts is the one above
    tasks = [
        ProbeTask("start of a program", "start", probes.launches(1), 1),
        ProbeTask("launches", "launches", probes.launches(3), 1, times=2),
        *(ProbeTask("buffers", str(number), probes.buffer(1 << 12, False), 1, moved=1 << 12) for number in range(12)),
    ]
    monkeypatch.setattr(_Calibrator, "_tasks", lambda _: tasks)
    devices = tuple(jax.devices()[:1])
    found = {}
    for seconds in (4.0, 40.0):
        calibration = _Calibrator(devices, autopar.cluster_from_devices(devices), seconds, show_progress=False)
        left_out = calibration.run().left_out
        assert calibration._ready.keys() == calibration._timed.keys()
        found[seconds] = left_out, [len(timings) for timings in calibration._timed.values()]
        assert len(calibration._clock.references) == sum(found[seconds][1])
    (few, once), (none, again) = found.values()
    assert 0 < few < len(tasks) and max(once) == 1 and few + len(once) == len(tasks)
    assert none == 0 and len(again) == len(tasks) and max(again) >= 2 and max(again) - min(again) <= 1


def test_a_result_in_place_of_an_operand_is_what_the_operand_was_made_to() -> None:
    clock = Clock(jax.devices()[:2], 0.01, 64)
    ready = clock.compile([(probes.buffer(1 << 26, in_place), 2, 1) for in_place in (True, False)])
    old, new = map(clock.time, ready)
    assert min(old.seconds, new.seconds) > 0
    assert new.faults > old.faults + 10  # there are many times as many, or they are of huge pages


def test_new_buffers_count_where_they_take_longer_than_old_ones() -> None:
    host = load_preset("cpu", devices_per_host=4).hosts[0]
    alone = {
        ProbeTask("start of a program", "", probes.launches(1), 4): Timed.of((1e-4,)),
        ProbeTask("launches", "", probes.launches(2), 4): Timed.of((1e-4,)),
    }

    def allocations(slower: float) -> tuple[tuple[float, float], ...]:
        tasks = {
            ProbeTask("buffers", "", probes.buffer(nbytes, old), 4, moved=nbytes): Timed.of(
                (nbytes * (1e-9 if old else slower),)
            )
            for nbytes in (1 << 20, 1 << 24)
            for old in (False, True)
        }
        return Machine({**alone, **tasks}, host, 4).fitted(None)[0].measured.allocations

    assert allocations(1.05e-9) == ()
    sizes, speeds = zip(*allocations(3e-9), strict=True)
    assert sizes == (1 << 20, 1 << 24)
    assert speeds == pytest.approx((5e8, 5e8))


def test_reading_against_the_order_is_what_it_takes_longer_than_in_order() -> None:
    host = load_preset("cpu", devices_per_host=4).hosts[0]
    tasks = {
        ProbeTask("start of a program", "", probes.launches(1), 4): Timed.of((1e-4,)),
        ProbeTask("launches", "", probes.launches(2), 4): Timed.of((1e-4,)),
    }
    for nbytes, slower in ((1 << 17, 1e-10), (1 << 23, 4e-9)):
        for blocks in (0, 1, 8):
            probe = probes.addition(64, nbytes // 256, 10, blocks)
            seconds = 10 * (nbytes // 256 * 256) * (1e-9 + slower * blocks)
            task = ProbeTask("order", str(blocks), probe, 4, moved=nbytes, times=10, strided=blocks > 0)
            tasks[task] = Timed.of((1e-4 + seconds,))
    sizes, speeds = zip(*Machine(tasks, host, 4).fitted(None)[0].measured.strided_reads, strict=True)
    assert sizes == (1 << 17, 1 << 23)
    assert speeds == pytest.approx((1e10 / 8**0.5, 2.5e8 / 8**0.5))


@pytest.mark.parametrize("blocks", [0, 1, 4])
def test_what_is_read_against_its_order_is_the_transposed_array(blocks: int) -> None:
    x, y = np.arange(64.0).reshape(16, 4), np.ones((16, 4))
    found, same = probes.addition(16, 4, 1, blocks).function(x, y)
    turned = np.concatenate([part.reshape(4, -1).T for part in np.split(x, blocks)]) if blocks else x
    np.testing.assert_array_equal(found, turned + y)
    np.testing.assert_array_equal(same, y)


def test_pooling_goes_through_all_windows() -> None:
    for of in ("result", "gradient"):
        probe = probes.pooling("float32", 2, 8, 3, 3, 2, of)
        assert [pooled_by(probe, each) for each in ("result", "gradient")].count(2 * 4 * 4 * 3 * 9) == 1
        assert pooled_by(probe, of) > 0


def test_pages_that_a_probe_waited_for_are_taken_out_of_its_time() -> None:
    """Of 64 MiB on each of 4 devices, a microsecond each; a small buffer, which is handed on, says nothing of them."""
    host = load_preset("cpu", devices_per_host=4).hosts[0]
    pages = 4 * (1 << 26) // resource.getpagesize()
    x = probes.linear("float32", 64, 64, 64, 1)

    def speed(buffers: dict[int, tuple[Timed, Timed]], linear: Timed) -> float:
        tasks = {
            ProbeTask("start of a program", "", probes.launches(1), 4): Timed.of((1e-4,)),
            ProbeTask("launches", "", probes.launches(2), 4): Timed.of((1e-4,)),
            ProbeTask("products", "", x, 4): linear,
        }
        for nbytes, (new, old) in buffers.items():
            tasks[ProbeTask("buffers", "", probes.buffer(nbytes, False), 4, moved=nbytes)] = new
            tasks[ProbeTask("buffers", "", probes.buffer(nbytes, True), 4, moved=nbytes)] = old
        kind, _ = Machine(tasks, host, 4).fitted(None)
        return max(each.flops for each in kind.measured.products)

    small = {1 << 20: (Timed.of((5e-4,), 2.0), Timed.of((1e-4,), 1.0))}
    large = {**small, 1 << 26: (Timed.of((pages * 1e-6 + 1e-3,), pages), Timed.of((1e-3,), 0.0))}
    plain = speed(large, Timed.of((1.1e-3,)))
    assert speed(large, Timed.of((1.6e-3,), 500)) == pytest.approx(plain, rel=1e-3)
    assert speed(small, Timed.of((1.6e-3,), 500)) == pytest.approx(plain * 1.0 / 1.5, rel=1e-3)
    assert speed(large, Timed.of((1.1e-3,), 1e9)) == pytest.approx(plain * 1.0 / 0.45, rel=1e-3)  # no more than half


def test_what_else_the_machine_does_is_not_taken_for_launches() -> None:
    """Most runs of the program of one launch were disturbed, those of many were not: the fastest runs tell."""
    host = load_preset("cpu", devices_per_host=4).hosts[0]
    tasks = {
        ProbeTask("start of a program", "", probes.launches(1), 4): Timed.of((1e-4, 5e-3, 5e-3)),
        ProbeTask("launches", "", probes.launches(2), 4): Timed.of((1e-3, 1e-3, 1e-3)),
    }
    kind, _ = Machine(tasks, host, 4).fitted(None)
    assert kind.launch_overhead * machine.LAUNCHES == pytest.approx(1e-3 - 1e-4)


def test_a_cluster_is_as_slow_as_the_steps_that_were_run() -> None:
    """Steps that took three times as long as predicted, in buffers of twice and four times the size."""
    host = load_preset("cpu", devices_per_host=4).hosts[0]
    products = (
        ProductSpeed("float32", ProductSizes(1, 64, 64, 64), 4e9),
        ProductSpeed("float32", ProductSizes(1, 4096, 512, 256), 3e10),
        ProductSpeed("float32", ProductSizes(1, 4096, 64, 512, Patches(9, 9.0)), 2e10),
    )
    kind = host.kind.with_measured(
        allocations=((1e3, 1e9), (1e7, 5e8)), bandwidths=((1e3, 9e9), (1e7, 4e9)), products=products
    )
    cluster = Cluster("test", (Host(kind, 4, host.link, (Busy(2, kind, host.link),)),), host.link)
    runs, truth = [], []
    for probe in probe_steps(1, 8):
        options = Options(cluster=cluster, method=recipes.data_parallel(1))
        traced = trace(probe.step, (probe.state, probe.batch), options)
        plan = traced.plan()
        larger = kind.with_measured(temporaries={"convolutions": 4.0, "others": 2.0})
        with_larger = dataclasses.replace(cluster, hosts=(dataclasses.replace(cluster.hosts[0], kind=larger),))
        convolves = probe.name == "convolutions"
        run = StepRun(probe, traced, plan, 1.0, 0.5, 4.0 if convolves else 2.0, convolves)
        assert (run.normalised(1.0).seconds, run.normalised(1.0).reference) == (2.0, 1.0)
        truth.append(3 * run.predicted(with_larger))
        runs.append(dataclasses.replace(run, seconds=truth[-1]))
    found, measurements = slowed(cluster, runs)
    assert [run.predicted(found) for run in runs] == pytest.approx(truth, rel=0.01)
    assert found.while_busy(2).hosts[0].kind == found.hosts[0].kind
    assert [each.predicted for each in measurements] == pytest.approx(truth)
    assert slowed(cluster, []) == (cluster, [])


def test_virtual_devices_take_turns() -> None:
    """A pipeline of devices that share their cores has no bubble: what one leaves, the others use."""

    def step(weights: dict[str, jax.Array], x: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
        def loss(weights: dict[str, jax.Array]) -> jax.Array:
            y = x
            for name in sorted(weights):
                y = jnp.tanh(y @ weights[name])
            return (y**2).mean()

        value, gradients = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - g, weights, gradients), value

    arguments = {f"w{i}": jax.ShapeDtypeStruct((512, 512), jnp.float32) for i in range(4)}
    x = jax.ShapeDtypeStruct((4096, 512), jnp.float32)
    virtual = load_preset("cpu", devices_per_host=4)
    real = dataclasses.replace(virtual, hosts=tuple(dataclasses.replace(h, busy=()) for h in virtual.hosts))
    times = {}
    for name, cluster in (("virtual", virtual), ("real", real)):
        pipeline = autopar.parallelize(step, cluster=cluster, method=recipes.megatron(1, 1, 4, 2)).plan(arguments, x)
        whole = autopar.parallelize(step, cluster=cluster, method=recipes.data_parallel(1)).plan(arguments, x)
        times[name] = pipeline.step_time / whole.step_time
        busy = sum(stage.compute + stage.communication for stage in pipeline.stages)
        if name == "virtual":
            assert pipeline.bubble < 0.05
            assert pipeline.step_time == pytest.approx(busy, rel=0.1)
        else:
            assert pipeline.bubble > 0.4
    assert times["virtual"] < 1.2 < 1.8 < times["real"]


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Ctrl-C in the middle of the third probe."""
    seen: list[int] = []
    time = Clock.time

    def third(self: Clock, *arguments: object) -> Timed:
        seen.append(1)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return time(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Clock, "time", third)
    return seen


def test_an_interrupted_calibration_leaves_nothing(interrupted: list[int], tmp_path: pathlib.Path) -> None:
    (tmp_path / "mine.json").write_text("of before")
    result = CliRunner().invoke(main, ["calibrate", "--devices", "1", "-o", str(tmp_path / "mine.json")])
    assert result.exit_code == 130
    assert "interrupted" in result.stderr
    assert len(interrupted) == 3
    assert [each.name for each in tmp_path.iterdir()] == ["mine.json"]
    assert (tmp_path / "mine.json").read_text() == "of before"


def test_the_command_writes_a_cluster_file(
    found: autopar.Calibration, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, object] = {}

    def measure(devices: object, **options: object) -> autopar.Calibration:
        asked.update(options, devices=devices)
        return found

    monkeypatch.setattr("autopar.cli.main.measure", measure)
    output = tmp_path / "mine.json"
    result = CliRunner().invoke(main, ["calibrate", "--devices", "2", "--seconds", "30", "-o", str(output), "--json"])
    assert result.exit_code == 0, result.stderr
    assert asked["devices"] == jax.devices()[:2]
    assert asked["seconds"] == 30
    assert json.loads(result.stdout)["format"] == "autopar-calibration"
    assert autopar.cluster_from_json(output) == found.cluster


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing option '-o'"),
        (["-o", "/nowhere/mine.json"], "there is no folder '/nowhere'"),
        (["-o", "mine.json", "--seconds", "3"], "seconds is 3.0: measuring takes at least 10"),
        (["-o", "mine.json", "--devices", "99"], "--devices 99: there are 8 of platform cpu"),
    ],
)
def test_mistakes_are_found_before_anything_is_measured(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(calibrator, "Clock", None)
    result = CliRunner().invoke(main, ["calibrate", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert not [*tmp_path.iterdir()]
