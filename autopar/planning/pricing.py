"""What lowered programs cost on a cluster: prices per mesh, and the plan with all its predictions."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

from autopar.cost_model.collective import make_collective_pricer, transfer_time
from autopar.cost_model.mesh_transfer import TransferPlan, plan_transfer
from autopar.cost_model.program_cost import ProgramCost, program_cost
from autopar.cost_model.reshard import Resharder, StepPrice
from autopar.cost_model.slowed import worst_of
from autopar.cost_model.timeline import StageHolds, StageTimes, Timeline, simulate
from autopar.ir.graph import Phase, Value
from autopar.ir.local import LocalProgram, Port, port_bytes
from autopar.ir.mesh import Cluster, DeviceKind, Mesh
from autopar.ir.plan import LeafPlan, Plan, StageMemory, StagePlan
from autopar.ir.program import PlacedStep
from autopar.ir.schedule import Schedule, ScheduleName, schedule_for
from autopar.ir.sharding import Sharding, StepKind
from autopar.ir.strategy import strategy_numbers
from autopar.passes.batch import BatchAnalysis
from autopar.passes.lower import LoweredStep

_RETURNING = (Phase.FORWARD, Phase.BACKWARD)  # from the start of the one to the end of the other


@dataclasses.dataclass(frozen=True)
class Played:
    """A lowered step in simulated time."""

    rows: Schedule
    costs: tuple[ProgramCost, ...]  # by program
    times: tuple[StageTimes, ...]  # by stage
    timeline: Timeline


class Prices:
    """Seconds and bytes on one cluster."""

    def __init__(self, cluster: Cluster, memory_limit: int | None = None, *, least_sum_bytes: int = 4) -> None:
        """`memory_limit`: bytes per device that a plan may use, where that is less than there are.

        `least_sum_bytes`: of an element of partial sums, see `accumulator_dtype`.
        """
        self.cluster, self.memory_limit, self._least_sum_bytes = cluster, memory_limit, least_sum_bytes
        self._resharders: dict[Mesh, tuple[Resharder, StepPrice]] = {}
        self._while_busy: dict[int, Prices] = {}
        self._kinds: dict[Mesh, DeviceKind] = {}
        self._transfers: dict[Hashable, TransferPlan] = {}
        self._pairs: dict[tuple[Mesh, Mesh], Hashable] = {}

    def while_busy(self, mesh: Mesh) -> Prices:
        """Prices while no other devices than those of a mesh are busy: others only where devices are virtual."""
        if mesh.size not in self._while_busy:
            cluster = self.cluster.while_busy(mesh.size)
            same = cluster is self.cluster
            self._while_busy[mesh.size] = (
                self if same else Prices(cluster, self.memory_limit, least_sum_bytes=self._least_sum_bytes)
            )
        return self._while_busy[mesh.size]

    def transfer_plan(
        self, value: Value, held: Sharding, source: Mesh, wanted: Sharding, target: Mesh
    ) -> TransferPlan:  # fmt: skip
        """The cheapest way for a value that is held so on one mesh to be on another as it is wanted there."""
        key = value.shape, value.itemsize, held, wanted, self._between(source, target)
        if key not in self._transfers:
            self._transfers[key] = plan_transfer(
                value.shape, value.itemsize, held, wanted, self.resharder(source)[0], self.resharder(target)[0],
                lambda copies, nbytes: transfer_time(self.cluster, copies, nbytes),
            )  # fmt: skip
        return self._transfers[key]

    def _between(self, source: Mesh, target: Mesh) -> Hashable:
        """Equal for pairs of meshes between which the same transfer takes the same: as many devices on like hosts."""
        if (source, target) not in self._pairs:
            key: Hashable = source, target
            if source.is_consecutive and target.is_consecutive:
                starts = [mesh.devices[0] for mesh in (source, target)]
                hosts = [{self.cluster.host_of(mesh.devices[at]) for at in (0, -1)} for mesh in (source, target)]
                apart = max(hosts[0]) < min(hosts[1]) or max(hosts[1]) < min(hosts[0])
                within = [start - self.cluster.host_bounds[min(on)] for start, on in zip(starts, hosts, strict=True)]
                key = (
                    *(self.surroundings(mesh) for mesh in (source, target)),
                    (source.shape, source.axes, target.shape, target.axes),
                    (*within, None if apart else starts[1] - starts[0]),
                )
            self._pairs[source, target] = key
        return self._pairs[source, target]

    def resharder(self, mesh: Mesh) -> tuple[Resharder, StepPrice]:
        """Prices of communication on a mesh; local steps cost their memory traffic."""
        if mesh not in self._resharders:
            collective = make_collective_pricer(self.cluster, mesh)
            kind = self.kind(mesh)
            bandwidth = kind.memory_bandwidth * kind.memory_efficiency

            def price(step: StepKind, axes: tuple[str, ...], payload: int) -> float:
                if step in ("slice", "mask"):
                    return payload / bandwidth + kind.launch_overhead / 10
                return collective(step, axes, payload) + kind.launch_overhead

            self._resharders[mesh] = (Resharder(mesh, price, self._least_sum_bytes, kind.dispatch_overhead), price)
        return self._resharders[mesh]

    def kind(self, mesh: Mesh) -> DeviceKind:
        """Of the kinds in the mesh what is slowest and smallest."""
        if mesh not in self._kinds:
            self._kinds[mesh] = worst_of(self.cluster.kinds_of(mesh.devices))
        return self._kinds[mesh]

    def memory(self, mesh: Mesh) -> int:
        """Bytes per device that a plan may use."""
        return self.usable(self.kind(mesh))

    def usable(self, kind: DeviceKind) -> int:
        """Bytes that a plan may use of a device of this kind."""
        there = kind.memory - kind.memory_reserve
        return there if self.memory_limit is None else min(there, self.memory_limit)

    def link_bandwidth(self, mesh: Mesh) -> float:
        """To the neighbouring stages: the network's where the mesh ends at a host's border."""
        return self._link_bandwidth(min(mesh.devices), max(mesh.devices))

    def _link_bandwidth(self, first: int, last: int) -> float:
        cluster = self.cluster
        low, high = cluster.host_of(first), cluster.host_of(last)
        slowest = cluster.hosts[low].link.among(2).bandwidth
        for host, ends in (
            (low, first == cluster.host_bounds[low] > 0),
            (high, cluster.num_devices > last + 1 == cluster.host_bounds[high + 1]),
        ):
            if ends:
                here = min(last + 1, cluster.host_bounds[host + 1]) - max(first, cluster.host_bounds[host])
                slowest = min(slowest, cluster.network.beside(here, cluster.hosts[host].num_devices))
        return slowest

    def surroundings(self, mesh: Mesh) -> Hashable:
        """Equal for meshes of one shape on which the same stage costs the same."""
        first = mesh.devices[0]
        return self.group(first, mesh.size) if mesh.is_consecutive else mesh.devices

    def group(self, start: int, size: int) -> Hashable:
        """Equal for groups of devices on which the same stage costs the same: devices of one host, or whole hosts.

        What matters: which of its devices share a host, their kinds, the links inside and outwards.
        """
        cluster, stop = self.cluster, start + size
        low, high = cluster.host_of(start), cluster.host_of(stop - 1)
        bandwidth = self._link_bandwidth(start, stop - 1)
        hosts = []  # the number of hosts that are alike, their kind, its reserve and link, devices of each
        while low <= high:
            end, host = min(high + 1, self._alike_until[low]), cluster.hosts[low]
            each = min(stop, cluster.host_bounds[low + 1]) - max(start, cluster.host_bounds[low])
            hosts.append((end - low, host.kind.name, host.kind.memory_reserve, host.link, each))
            low = end
        return tuple(hosts), bandwidth

    def kinds_of_hosts(self, mesh: Mesh) -> frozenset[Hashable]:
        """What hosts a mesh has devices of: their kinds and links."""
        first, last = (self.cluster.host_of(mesh.devices[at]) for at in (0, -1))
        return frozenset((host.kind.name, host.link) for host in self.cluster.hosts[first : last + 1])

    @functools.cached_property
    def _alike_until(self) -> list[int]:
        """Per host the next one that differs."""
        ends: list[int] = []
        for _, equal in itertools.groupby(self.cluster.hosts):
            number = len(tuple(equal))
            ends += [len(ends) + number] * number
        return ends

    def play(self, lowered: LoweredStep, schedule: ScheduleName) -> Played:
        """Every program and transfer priced, and the schedule played in simulated time."""
        placed = lowered.placed
        rows = schedule_for(schedule, [s.mesh for s in lowered.shardings], lowered.loop_microbatches)
        costs = []
        for local in lowered.programs:
            prices = self.while_busy(local.mesh)
            costs.append(program_cost(local, prices.kind(local.mesh), prices.resharder(local.mesh)[1]))

        def seconds(stage: int, *phases: Phase) -> float:
            total = 0.0
            for local, cost in zip(lowered.programs, costs, strict=True):
                if local.program.stage == stage and local.program.phase in phases:
                    total += cost.start + cost.seconds
            return total

        times = tuple(
            StageTimes(
                seconds(s, Phase.FORWARD),
                seconds(s, Phase.BACKWARD),
                seconds(s, Phase.PROLOGUE),
                seconds(s, Phase.UPDATE),
                seconds(s, Phase.WEIGHTS),
            )
            for s in range(placed.num_stages)
        )
        transfers: dict[tuple[int, int, Phase], float] = {}
        for crossing in lowered.crossings:
            key = (crossing.source, crossing.target, _sending_phase(crossing.value, placed))
            transfers[key] = transfers.get(key, 0.0) + crossing.plan.seconds
        return Played(rows, tuple(costs), times, simulate(rows, times, transfers, self._turns(rows, lowered)))

    def price(
        self,
        analysis: BatchAnalysis,
        method: str,
        lowered: LoweredStep,
        layer_of: Mapping[int, int],
        schedule: ScheduleName,
        bound: float,
        gap: float,
    ) -> Plan:
        """The plan of a lowered step: every program and transfer priced, the schedule played in simulated time.

        `layer_of` gives the layer of each forward equation by id, in program order.
        """
        graph = analysis.graph
        placed, rules = lowered.placed, lowered.rules
        m = placed.step.num_microbatches
        played = self.play(lowered, schedule)
        rows, costs, timeline = played.rows, played.costs, played.timeline
        stages = []
        placed_at = {e.id: p.stage for p in placed.programs for e in p.equations}
        at_stage = [placed_at[e] for e in layer_of]
        layers = list(layer_of.values())
        for index in range(placed.num_stages):
            mesh = lowered.shardings[index].mesh
            mine = [(p, c) for p, c in zip(lowered.programs, costs, strict=True) if p.program.stage == index]
            often = [lowered.loop_microbatches if p.program.in_loop else 1 for p, _ in mine]
            chosen = [i for i, stage in enumerate(at_stage) if stage == index]
            mine_layers = [layers[i] for i in chosen]
            span = (min(mine_layers), max(mine_layers) + 1) if chosen else (0, 0)
            sharding = lowered.shardings[index]
            phases = _seconds_by_phase(mine, lowered)
            stages.append(
                StagePlan(
                    mesh,
                    span,
                    (chosen[0], chosen[-1] + 1) if chosen else (0, 0),
                    {(p, e): strategy_numbers(s, len(rules[e].factors)) for (p, e), s in sharding.strategies.items()},
                    {(p, v.id): s for (p, v), s in sharding.layouts.items()},
                    sharding.reshard_after_forward,
                    phases[Phase.FORWARD],
                    phases[Phase.BACKWARD],
                    phases[Phase.PROLOGUE] + phases[Phase.UPDATE],
                    sum(c.compute * n for (_, c), n in zip(mine, often, strict=True)),
                    sum(c.communication * n for (_, c), n in zip(mine, often, strict=True)),
                    self._memory(lowered, index, mine, rows.held(index)),
                    tuple(b for b in placed.step.recomputed if chosen and chosen[0] <= b.start <= chosen[-1]),
                    phases[Phase.WEIGHTS],
                )
            )
        kept: dict[tuple[int, ...], int] = defaultdict(int)
        for stage in stages:
            kept[stage.mesh.devices] += stage.memory.kept
        for index, stage in enumerate(stages):
            others = kept[stage.mesh.devices] - stage.memory.kept  # of other stages on these devices
            memory = dataclasses.replace(stage.memory, capacity=stage.memory.capacity - others)
            stages[index] = dataclasses.replace(stage, memory=memory)
        flops = sum(
            c.flops * p.mesh.size * (lowered.loop_microbatches if p.program.in_loop else 1)
            for p, c in zip(lowered.programs, costs, strict=True)
        )
        leaves = _leaves(analysis, lowered)
        return Plan(
            graph.name, graph.fingerprint, method, self.cluster, m, analysis.batch_size, schedule, tuple(stages),
            leaves, timeline.makespan, timeline.bubble_fraction, flops, bound, gap, (), graph.padding,
        )  # fmt: skip

    def _turns(self, schedule: Schedule, lowered: LoweredStep) -> tuple[int, ...]:
        """Per group of devices a number, the same for those whose programs take turns: of one host of virtual ones."""
        turns = []
        for group in range(schedule.num_groups):
            first = next(s for s in range(schedule.num_stages) if schedule.group_of(s) == group)
            host = self.cluster.host_of(lowered.shardings[first].mesh.devices[0])
            turns.append(-1 - host if self.cluster.hosts[host].busy else group)
        return tuple(turns)

    def _memory(
        self, lowered: LoweredStep, stage: int, mine: Sequence[tuple[LocalProgram, ProgramCost]],
        in_flight: Mapping[tuple[Phase, Phase], int],
    ) -> StageMemory:  # fmt: skip
        holds = stage_holds(lowered, stage, mine, in_flight)
        activations = holds.throughout + sum(n * in_flight[when] for when, n in holds.per_microbatch.items())
        running = max(holds.running.values(), default=0)
        return StageMemory(
            holds.state, holds.gradients, activations, running, self.memory(lowered.shardings[stage].mesh)
        )


def _seconds_by_phase(
    mine: Sequence[tuple[LocalProgram, ProgramCost]], lowered: LoweredStep
) -> dict[Phase, float]:  # fmt: skip
    """Seconds of each phase of a stage, per microbatch or per step, though programs of several phases are one.

    What a loop's programs compute for themselves in each of several microbatches is of their phase. Of a program that
    begins with the last microbatch, what it takes more than a microbatch is the update's.
    """
    seconds_by_phase = dict.fromkeys(Phase, 0.0)
    num_microbatches = lowered.placed.step.num_microbatches
    for local, cost in mine:
        often = local.program.in_loop and num_microbatches > 1
        last = lowered.loop_microbatches < num_microbatches and not local.program.in_loop
        for phase, seconds in cost.by_phase.items():
            of = Phase.UPDATE if last and phase.in_loop else phase
            seconds_by_phase[of if of.in_loop or not often else local.program.phase] += seconds
        if often and lowered.loop_microbatches < num_microbatches:
            seconds_by_phase[Phase.UPDATE] -= sum(cost.by_phase.values())
    return seconds_by_phase


def stage_holds(
    lowered: LoweredStep, stage: int, mine: Sequence[tuple[LocalProgram, ProgramCost]],
    in_flight: Mapping[tuple[Phase, Phase], int],
) -> StageHolds:  # fmt: skip
    """What a stage holds on each device, and when; `in_flight` as `Schedule.held` has it."""
    step = lowered.placed.step
    mesh = lowered.shardings[stage].mesh
    stored = {p for v, p in lowered.homes.items() if lowered.placed.home[v] == stage and v not in step.feeds}
    batch = {source for source, _ in step.feeds.values()}
    sums = set(step.accumulate.values())
    inputs = set(step.graph.inputs) | set(step.constants)
    state = {p for p in stored if p.value not in batch}
    gradients: set[Port] = set()
    throughout: dict[Port, int] = {}  # so many copies
    held: dict[Port, tuple[Phase, Phase]] = {}  # of which there are most
    made = {port: local.program.phase for local, _ in mine for port in local.outputs}
    for local, _ in mine:
        phase = local.program.phase
        for port in local.inputs:
            when = made.get(port, Phase.FORWARD), phase
            if port.value in sums:
                gradients.add(port)
            elif port.value in step.feeds:  # the whole batch is there when a step begins
                throughout[port] = step.num_microbatches
            elif port.value in inputs:
                state.add(port)
            elif when not in in_flight:
                throughout[port] = 1
            elif port not in held or in_flight[when] > in_flight[held[port]]:
                held[port] = when
    per_microbatch: dict[tuple[Phase, Phase], int] = defaultdict(int)
    for port, (first, last) in held.items():
        per_microbatch[(first, last) if last is Phase.WEIGHTS else _RETURNING] += port_bytes(port, mesh)
    running: dict[Phase, int] = {}
    for (local, _), nbytes in zip(mine, while_running(lowered, mine), strict=True):
        running[local.program.phase] = max(running.get(local.program.phase, 0), nbytes)
    return StageHolds(
        sum(port_bytes(p, mesh) for p in state), sum(port_bytes(p, mesh) for p in gradients),
        sum(port_bytes(p, mesh) * n for p, n in throughout.items() if p not in held), per_microbatch, running,
    )  # fmt: skip


def while_running(lowered: LoweredStep, mine: Sequence[tuple[LocalProgram, ProgramCost]]) -> list[int]:
    """Bytes on each device while each of a stage's programs runs, beyond what a step keeps there."""
    step = lowered.placed.step
    sums = set(step.accumulate.values())
    read = {port for local, _ in mine for port in local.inputs}
    renewed = {step.graph.inputs[i]: step.outputs[k] for k, i in step.graph.carried.items()}
    nbytes = []
    for local, cost in mine:
        taken = {port.value for port in local.inputs}
        in_place = sums | {v for leaf, v in renewed.items() if leaf in taken}
        fresh = (port for port in local.outputs if port not in read and port.value not in in_place)
        nbytes.append(cost.temporaries + sum(port_bytes(port, local.mesh) for port in fresh))
    return nbytes


def _leaves(analysis: BatchAnalysis, lowered: LoweredStep) -> tuple[LeafPlan, ...]:
    graph = analysis.graph
    carried = set(graph.carried.values())
    leaves = []
    windows = {
        k: (cut.axis, *window)
        for leaf, cut in graph.input_cuts.items()
        for k, window in zip(graph.inputs_of[leaf], cut.windows, strict=True)
    }
    for i, (value, path) in enumerate(zip(graph.inputs, graph.input_paths, strict=True)):
        batch = analysis.states[value].batch
        port = lowered.homes[value]
        leaves.append(
            LeafPlan(
                path,
                value.shape,
                str(value.dtype),
                lowered.placed.home[value],
                port.sharding,
                i in carried,
                batch.dim if batch else None,
                windows.get(i),
            )
        )
    return tuple(leaves)


def _sending_phase(value: Value, placed: PlacedStep) -> Phase:
    """The phase of the program after which a value crosses: the last stage goes backward in its forward program."""
    phase = crossing_phase(value, placed)
    return placed.programs[placed.producer[value]].phase if phase is Phase.BACKWARD else phase


def crossing_phase(value: Value, placed: PlacedStep) -> Phase:
    """When a value crosses: with each microbatch, or before or after the loop."""
    step = placed.step
    if value in step.graph.inputs:
        return Phase.PROLOGUE
    if value in placed.producer and value in step.batched:
        phase = placed.programs[placed.producer[value]].phase
        backward = {v for e in step.equations if e.phase is Phase.BACKWARD for v in e.outputs}
        return Phase.BACKWARD if phase is Phase.BACKWARD or value in backward else Phase.FORWARD
    if value in placed.producer and placed.programs[placed.producer[value]].phase is Phase.PROLOGUE:
        return Phase.PROLOGUE
    return Phase.UPDATE
