"""From a plan for many hosts to what each of them does: `python -m benchmarks.distribution --json FILE`.

A GPT of 48 layers on 8 to 64 hosts of 8 H100s that need not be there, 16 stages and 64 microbatches, by 1F1B, GPipe and
interleaved; as one scan over layers and unrolled. Planning is not counted. Measured are the seconds that it takes to
make
- the list of instructions of all stages, and each host's part of it;
- which device sends what to which, for all that crosses between stages, and each host's part of it;
- the proof that no host waits for ever;
- the step in simulated time, its programs and transfers priced;
and the memory that the process has used at most, planning included.

Bars, of the largest number of hosts: all of it in 10 s and 1 GiB.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import optax

from autopar import recipes
from autopar.compiling.compiler import transfers_of
from autopar.compiling.program_sources import device_mesh, instructions_of
from autopar.cost_model import mesh_transfer
from autopar.cost_model.hardware import load_preset
from autopar.cost_model.targets import load_target
from autopar.ir.schedule import ScheduleName
from autopar.passes.launches import check_launches
from autopar.planning.pricing import Prices
from autopar.runtime.ahead import absent_gpus
from benchmarks import common
from benchmarks.growth import CONFIG
from benchmarks.models import gpt
from benchmarks.traced import trace

HOSTS = (8, 16, 32, 64)
STAGES, MICROBATCHES = 16, 64
SCHEDULES: tuple[ScheduleName, ...] = ("1f1b", "gpipe", "interleaved")
MOST_SECONDS, MOST_GIB = 10.0, 1.0

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Case:
    """A plan."""

    hosts: int
    schedule: ScheduleName
    scan: bool
    layers: int = CONFIG.num_layers
    stages: int = STAGES
    microbatches: int = MICROBATCHES


def cases() -> list[Case]:
    """All of them: every schedule scanned, and 1F1B unrolled."""
    kinds = [*((schedule, True) for schedule in SCHEDULES), (SCHEDULES[0], False)]
    return [Case(hosts, schedule, scan) for schedule, scan in kinds for hosts in HOSTS]


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    started = time.perf_counter()
    found = work()
    return found, time.perf_counter() - started


def measure(case: Case) -> dict[str, Any]:
    """Plan it, then make what the hosts need."""
    common.use_virtual_devices(1)
    optimizer = optax.adamw(1e-3)
    config = dataclasses.replace(CONFIG, num_layers=case.layers, scan=case.scan)
    cluster = load_preset("dgx-h100", num_hosts=case.hosts)
    # Interleaved, each group of devices has two of the stages.
    groups = case.stages // 2 if case.schedule == "interleaved" else case.stages
    shape = (cluster.num_devices // groups,)
    layers = case.layers // case.stages
    method = recipes.pipeline([(layers, shape)] * case.stages, case.microbatches, case.schedule)
    state = jax.eval_shape(gpt.make_init(config, optimizer), jax.random.key(0))
    batch = gpt.abstract_batch(config, case.microbatches * shape[0])
    step = gpt.make_train_step(config, optimizer)
    (plan, lowered), planning = _timed(lambda: trace(step, state, batch).search(cluster, method))

    meshes = [sharding.mesh for sharding in lowered.shardings]
    hosts_of = [frozenset(cluster.host_of(device) for device in mesh.devices) for mesh in meshes]
    stages_of = [
        frozenset(stage for stage, hosts in enumerate(hosts_of) if host in hosts) for host in range(case.hosts)
    ]
    instructions, lists = _timed(lambda: instructions_of(lowered, plan.schedule, frozenset()))
    parts, cutting = _timed(lambda: [instructions.of_stages(stages) for stages in stages_of])
    mesh_transfer._copies.cache_clear()  # of what planning has made
    devices = absent_gpus(load_target("h100"), case.hosts, cluster.num_devices // case.hosts)
    on_devices = [device_mesh(mesh, devices) for mesh in meshes]
    transfers, crossing = _timed(lambda: transfers_of(lowered, on_devices))
    routes, routing = _timed(lambda: [each.route_of(host) for host in range(case.hosts) for each in transfers])
    offered = sum(len(tiles) for route in routes for tiles in route.offers.values())
    pulled = sum(len(tiles) for route in routes for tiles in route.pulls.values())
    if offered != pulled:
        raise RuntimeError(f"{case}: {offered} tiles are sent, {pulled} are awaited")
    _, proof = _timed(lambda: check_launches(parts, hosts_of))
    played, simulating = _timed(lambda: Prices(cluster).play(lowered, plan.schedule))
    if played.timeline.makespan != plan.step_time:
        raise RuntimeError(f"{case}: simulated {played.timeline.makespan} s, planned {plan.step_time} s")
    return {
        **dataclasses.asdict(case), "devices": cluster.num_devices, "instructions": len(instructions.instructions),
        "tiles": sum(len(each.tiles.copies) for each in transfers), "sent": offered, "planning": planning,
        "lists": lists, "parts": cutting, "copies": crossing, "routes": routing, "proof": proof,
        "simulating": simulating, "seconds": lists + cutting + crossing + routing + proof + simulating,
        "gib": common.most_memory() / 2**30,
    }  # fmt: skip


def bars_of(rows: Sequence[dict[str, Any]]) -> dict[str, common.Bar]:
    """Of the plans for the most hosts."""
    most = max(row["hosts"] for row in rows)
    largest = [row for row in rows if row["hosts"] == most]
    return {
        "hosts_missing": common.Bar(max(HOSTS) - most, 0),
        "seconds": common.Bar(max(row["seconds"] for row in largest), MOST_SECONDS, n=len(largest), unit="s"),
        "memory": common.Bar(max(row["gib"] for row in largest), MOST_GIB, n=len(largest), unit="GiB"),
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.distribution", description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, choices=HOSTS, action="append", help="only so many")
    parser.add_argument("--json", type=pathlib.Path, help="write the numbers to this file")
    arguments = parser.parse_args()
    chosen = [case for case in cases() if not arguments.hosts or case.hosts in arguments.hosts]
    rows = []
    for row in common.each_in_a_process(measure, chosen):
        rows.append(row)
        print(
            f"{row['hosts']} hosts, {row['schedule']}, {'scanned' if row['scan'] else 'unrolled'}: "
            f"{row['instructions']} instructions, {row['tiles']} tiles; planned in {row['planning']:.1f} s; "
            f"lists {row['lists']:.2f} s, parts {row['parts']:.2f} s, copies {row['copies']:.2f} s, routes "
            f"{row['routes']:.2f} s, "
            f"proof {row['proof']:.2f} s; simulated in {row['simulating']:.2f} s; {row['gib']:.2f} GiB",
            flush=True,
        )
    common.report(bars_of(rows), rows, arguments.json)


if __name__ == "__main__":
    main()
