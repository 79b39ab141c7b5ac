"""Holds a plan against XLA: its programs compiled ahead of time for the cluster, which need not be there.

What is compared is what the plan has priced: the memory of every program on each device, and its collectives by kind,
mesh axes and link. Programs that are the same are compiled once: all meshes are laid onto the first devices that lie in
hosts as theirs do.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax

from autopar.compiling.program_sources import device_mesh, instructions_of, write_sources
from autopar.cost_model.compute import compute_time
from autopar.cost_model.order import Combining, ProgramKernel
from autopar.cost_model.overlap import hidden_seconds
from autopar.cost_model.program_cost import ProgramCost, program_cost
from autopar.cost_model.reshard import StepPrice
from autopar.cost_model.targets import CPU, load_target, target_of
from autopar.errors import InternalError, TargetError
from autopar.ir.graph import Equation
from autopar.ir.local import Compute, LocalProgram, Port, port_bytes
from autopar.ir.mesh import Cluster, DeviceKind, Mesh
from autopar.ir.plan import Plan
from autopar.ir.sharding import Collective
from autopar.ir.units import bytes_text
from autopar.ir.verification import (
    MEMORY_TOLERANCE,
    TRAFFIC_TOLERANCE,
    CollectiveTraffic,
    KernelTraffic,
    Overlap,
    ProgramBytes,
    ProgramCheck,
    StageCheck,
    Verification,
)
from autopar.passes.lower import LoweredStep
from autopar.planning.pricing import Prices, while_running
from autopar.runtime.ahead import Ahead, absent_gpus, compile_ahead
from autopar.runtime.hlo import collectives_in_hlo
from autopar.runtime.hlo_memory import Held, held_at_peak
from autopar.runtime.hlo_schedule import HloIssued, schedule_in_hlo
from autopar.runtime.hlo_traffic import HloKernel, kernels_in_hlo
from autopar.runtime.source import Source

_MOST_NAMED = 3  # of the operators that a remark names

Progress = Callable[[int, int], None]  # is told how many programs are compiled, of how many


def verify(
    prices: Prices, plan: Plan, lowered: LoweredStep, donate: frozenset[int], target: str | None,
    progress: Progress, most_operations: int | None,
) -> Verification:  # fmt: skip
    """Compile all programs of a plan; `target` of a chip, "cpu", or a file: default, by the cluster's device kinds.

    Raises:
      TargetError: the target is not known, its compiler is not there or refuses, or there is too much to compile.
    """
    instructions = instructions_of(lowered, plan.schedule, donate)
    targets = [target or target_of(prices.kind(s.mesh)) for s in lowered.shardings]
    meshes = _device_meshes(plan.cluster, [s.mesh for s in lowered.shardings], targets)
    sources = write_sources(lowered, instructions, meshes)
    # Names are of stages, and part of what XLA is given.
    alike = [
        dataclasses.replace(source, name=local.program.phase.value)
        for source, local in zip(sources, lowered.programs, strict=True)
    ]
    results = compile_ahead(alike, progress, most_operations)
    costs = [program_cost(p, prices.kind(p.mesh), prices.resharder(p.mesh)[1]) for p in lowered.programs]
    predicted = [_predicted(*each) for each in zip(lowered.programs, sources, costs, strict=True)]
    groups: dict[int, list[int]] = defaultdict(list)
    for index, (_, first) in enumerate(results):
        groups[first].append(index)
    checks = []
    for first, members in groups.items():
        local, ahead = lowered.programs[first], results[first][0]
        on_cpu = targets[local.program.stage] == CPU
        traffic = _traffic(plan.cluster, local, costs[first], ahead, as_sent=not on_cpu)
        kind, price = prices.kind(local.mesh), prices.resharder(local.mesh)[1]
        hidden = None if on_cpu else _hidden(ahead.text, local.mesh, kind, price)
        set_aside = ProgramBytes(ahead.arguments, ahead.outputs, ahead.aliased, ahead.temporaries)
        checks.append(
            ProgramCheck(
                tuple(lowered.programs[k].program.name for k in members),
                tuple(sorted({lowered.programs[k].program.stage for k in members})),
                local.program.phase.value, predicted[first], set_aside, traffic,
                KernelTraffic(costs[first].launches, costs[first].moved), _kernels(ahead.text),
                Overlap(costs[first].communication, costs[first].hidden, hidden),
                _remarks(local, predicted[first], set_aside, traffic, ahead), ahead.seconds,
            )
        )  # fmt: skip
    excess = [ahead.total - p.total for (ahead, _), p in zip(results, predicted, strict=True)]
    stages = tuple(_stage(prices, plan, lowered, stage, costs, excess) for stage in range(len(plan.stages)))
    versions = f"jaxlib {importlib.metadata.version('jaxlib')}"
    return Verification(plan.function, ", ".join(dict.fromkeys(targets)), versions, stages, tuple(checks))


def _device_meshes(cluster: Cluster, meshes: Sequence[Mesh], targets: Sequence[str]) -> list[jax.sharding.Mesh]:
    """Each mesh on the first devices of its target that lie in hosts as its own do."""
    device_meshes: list[jax.sharding.Mesh] = []
    per_host = max(host.num_devices for host in cluster.hosts)
    places = []
    for mesh in meshes:
        hosts = [cluster.host_of(device) for device in mesh.devices]
        inside = [device - cluster.host_bounds[host] for device, host in zip(mesh.devices, hosts, strict=True)]
        # Within one host it does not matter which; of whole hosts the devices have their own numbers.
        shift = min(inside) if len(set(hosts)) == 1 else 0
        places.append([(h - min(hosts), i - shift) for h, i in zip(hosts, inside, strict=True)])
    devices = {
        name: _devices(name, [place for place, its in zip(places, targets, strict=True) if its == name], per_host)
        for name in dict.fromkeys(targets)
    }
    for mesh, name, place in zip(meshes, targets, places, strict=True):
        there = devices[name]
        if name == CPU:
            chosen = list(there[: mesh.size])
        else:
            chosen = [there[host * per_host + inside] for host, inside in place]
        moved = dataclasses.replace(mesh, devices=tuple(range(mesh.size)))
        device_meshes.append(device_mesh(moved, chosen))
    return device_meshes


def _devices(target: str, places: Sequence[Sequence[tuple[int, int]]], per_host: int) -> Sequence[jax.Device]:
    if target != CPU:
        num_hosts = 1 + max(host for place in places for host, _ in place)
        return absent_gpus(load_target(target), num_hosts, per_host)
    there, wanted = jax.devices("cpu"), max(map(len, places))
    if len(there) < wanted:
        raise TargetError(
            f"target='cpu': the largest stage has {wanted} devices, there are {len(there)} on CPUs. Say "
            f"jax.config.update('jax_num_cpu_devices', {wanted}) before JAX is used."
        )
    return there


def _predicted(local: LocalProgram, source: Source, cost: ProgramCost) -> ProgramBytes:
    def nbytes(ports: Iterable[Port]) -> int:
        return sum(port_bytes(port, local.mesh) for port in ports)

    aliased = nbytes(local.inputs[k] for k in source.donated)
    return ProgramBytes(nbytes(local.inputs), nbytes(local.outputs), aliased, cost.temporaries)


def _traffic(
    cluster: Cluster, local: LocalProgram, cost: ProgramCost, ahead: Ahead, *, as_sent: bool
) -> tuple[CollectiveTraffic, ...]:
    predicted = _counted(cost.collectives)
    sent = _counted(collectives_in_hlo(ahead.text, local.mesh, as_sent=as_sent))
    return tuple(
        CollectiveTraffic(
            kind, axes, cluster.link_among(local.mesh.group(axes)).name, predicted.get((kind, axes), (0, 0)),
            sent.get((kind, axes), (0, 0)),
        )
        for kind, axes in dict.fromkeys([*predicted, *sent])
    )  # fmt: skip


def _hidden(text: str, mesh: Mesh, kind: DeviceKind, price: StepPrice) -> float | None:
    """Seconds by which a compiled program is shorter, since it runs collectives beside kernels."""
    if not kind.xla.hides_latency:
        return None
    try:
        issued = schedule_in_hlo(text, mesh)
    except InternalError:  # a loop whose rounds nobody knows
        return None
    return _hidden_of(issued, kind, price)


def _hidden_of(issued: Sequence[HloIssued], kind: DeviceKind, price: StepPrice) -> float:
    in_rounds = [each.rounds * _hidden_of(each.round, kind, price) if each.round else 0.0 for each in issued]
    kernels = [_priced(each, kind, price, shorter) for each, shorter in zip(issued, in_rounds, strict=True)]
    return sum(in_rounds) + hidden_seconds(kernels, kind.xla.overlap_slowdown)


def _priced(issued: HloIssued, kind: DeviceKind, price: StepPrice, shorter: float) -> ProgramKernel:
    """`shorter`: seconds by which a loop is, since it hides collectives in its rounds."""
    sent = sum(price(each.kind, each.axes, each.payload) for each in issued.collectives)
    computed = sum(each.times * _kernel_seconds(each, kind) for each in issued.kernels)
    is_collective = bool(issued.collectives) and not issued.kernels
    return ProgramKernel(
        (), (), collective=Combining(None, False) if is_collective else None, cost=sent + computed - shorter,
        starts=issued.starts, ends=issued.ends,
    )  # fmt: skip


def _kernel_seconds(kernel: HloKernel, kind: DeviceKind) -> float:
    dtype, nbytes = _DTYPES.get(kernel.dtype, kernel.dtype), kernel.read + kernel.written
    multiplies = kernel.flops > 0
    busy = compute_time(kind, flops=kernel.flops, bytes_moved=nbytes, dtype=dtype, matmul=multiplies)
    return busy + kind.launch_overhead


_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64", "c64": "complex64"}


def _kernels(text: str) -> KernelTraffic | None:
    try:
        kernels = kernels_in_hlo(text)
    except InternalError:  # a loop whose rounds nobody knows
        return None
    return KernelTraffic(sum(k.times for k in kernels), sum(k.nbytes for k in kernels))


def _counted(collectives: Sequence[Collective]) -> Mapping[tuple[str, tuple[str, ...]], tuple[int, int]]:
    totals: dict[tuple[str, tuple[str, ...]], tuple[int, int]] = {}
    for each in collectives:
        count, nbytes = totals.get((each.kind, each.axes), (0, 0))
        totals[each.kind, each.axes] = count + 1, nbytes + each.payload
    return totals


def _stage(
    prices: Prices, plan: Plan, lowered: LoweredStep, stage: int, costs: Sequence[ProgramCost], excess: Sequence[int]
) -> StageCheck:
    """`excess`: bytes that XLA sets aside for each program beyond what was predicted."""
    memory = plan.stages[stage].memory
    mine = [k for k, local in enumerate(lowered.programs) if local.program.stage == stage]
    running = while_running(lowered, [(lowered.programs[k], costs[k]) for k in mine])
    peak = max((excess[k] + nbytes for k, nbytes in zip(mine, running, strict=True)), default=0)
    kind = prices.kind(lowered.shardings[stage].mesh)
    return StageCheck(stage, memory.total, memory.kept + peak, memory.capacity, kind.memory_reserve)


def _remarks(
    local: LocalProgram,
    predicted: ProgramBytes,
    set_aside: ProgramBytes,
    traffic: Sequence[CollectiveTraffic],
    ahead: Ahead,
) -> tuple[str, ...]:
    remarks = []
    if abs(predicted.total - set_aside.total) > MEMORY_TOLERANCE * set_aside.total:
        more = "more" if set_aside.total > predicted.total else "less"
        difference = bytes_text(abs(set_aside.total - predicted.total))
        remarks.append(
            f"XLA sets aside {difference} {more} than predicted ({bytes_text(set_aside.temporaries)} of temporaries, "
            f"not {bytes_text(predicted.temporaries)}). At its peak it holds "
            f"{_largest(local, held_at_peak(ahead.text))}."
        )
    for each in traffic:
        (count, nbytes), (found_count, found_bytes) = each.predicted, each.found
        if abs(nbytes - found_bytes) > TRAFFIC_TOLERANCE * found_bytes:
            remarks.append(
                f"{each.kind} over {'×'.join(each.axes)} ({each.link}): {found_count} of {bytes_text(found_bytes)} "
                f"together, not {count} of {bytes_text(nbytes)}."
            )
    return tuple(remarks)


def _largest(local: LocalProgram, held: Sequence[Held]) -> str:
    """The operators whose results are most of what is held."""
    equations = {op.equation.id: op.equation for op in local.ops if isinstance(op, Compute)}
    makers: dict[int, Equation] = {v.id: e for e in equations.values() for v in e.outputs}
    sizes: Counter[str] = Counter()
    for each in held:
        sizes[_operator(each, equations, makers)] += each.nbytes
    named = [f"{bytes_text(nbytes)} of {name}" for name, nbytes in sizes.most_common(_MOST_NAMED)]
    return ", ".join(named) or "nothing"


def _operator(held: Held, equations: Mapping[int, Equation], makers: Mapping[int, Equation]) -> str:
    for part in reversed(held.scope.split("/")):
        if part[:1] in ("e", "v") and part[1:].isdigit():
            known = equations if part[0] == "e" else makers
            eqn = known.get(int(part[1:]))
            if eqn is not None:
                sent = f"{held.opcode.removesuffix('-start')} of " if part[0] == "v" else ""
                return f"{sent}{eqn.primitive.name} ({eqn.source or 'no line'})"
    return held.scope.split("/")[-1] or held.opcode
