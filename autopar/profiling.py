"""Steps run with their instructions timed."""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from autopar.cost_model.program_cost import KindWork
from autopar.errors import ArgumentError
from autopar.ir.instructions import Copy
from autopar.ir.local import OperatorKind
from autopar.planning.details import played_timeline
from autopar.reporting.profile import KernelRow, Profile, Timeline, mean_of
from autopar.reporting.record import Copying, ReportRecord, TimelineSpan
from autopar.runtime.kernel_times import KernelTimes, traced_kernels
from autopar.runtime.processes import Processes, this_job
from autopar.runtime.recorder import Event, Recorder, Span, spans_of
from autopar.runtime.spent import wait_for
from autopar.runtime.wiring import Wiring
from autopar.tracing.in_place import changed_in

if TYPE_CHECKING:
    from autopar.executable import Executable


_WARM_UP = 2  # steps: the second is the first of the state that a step has returned


def profile_of(
    executable: Executable, args: tuple[Any, ...], kwargs: Mapping[str, Any], steps: int, *, kernels: bool = False
) -> Profile:
    """As `Executable.profile`."""
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ArgumentError(f"profile(steps={steps!r}): pass a whole number of 1 or more.")
    config: Any = jax.config
    for name in ("jax_debug_nans", "jax_debug_infs", "jax_disable_jit"):
        if getattr(config, name):
            raise ArgumentError(f"profile: {name} is on, so that the step runs otherwise than it does: switch it off.")
    worker, job, plan = executable._worker, this_job(), executable.plan
    wiring = worker.wiring
    groups = ReportRecord(plan, None).groups
    group_of = {stage: k for k, group in enumerate(groups) for stage in group.stages}
    recorder = Recorder(
        wiring.instructions.instructions, group_of, None if worker.mail is None else worker.mail.channel
    )
    recorded: list[tuple[float, list[Event]]] = []
    calls = _Calls(executable, args, kwargs)
    worker.recorder = recorder
    try:
        for _ in range(_WARM_UP + steps):
            calls.prepare()
            if job is not None:
                job.combined("", lambda _: "", "to begin a step together")
            recorder.begin()
            began = time.perf_counter()
            calls.run()
            seconds, events = time.perf_counter() - began, recorder.ended()
            recorded.append((max([seconds, *(event.ended for event in events)]), events))  # threads see ends a bit late
    finally:
        worker.recorder = None
        recorder.close()
    rows = _kernel_rows(executable, calls, steps, job) if kernels else ()
    told = [_of_job(job, seconds, events, wiring) for seconds, events in recorded[_WARM_UP:]]
    predicted = played_timeline(*plan.played())
    in_turns = all(event.is_waited_for for _, events in told for event in events if event.to is None)
    num_groups = predicted.num_groups if in_turns else len(groups)
    measured = mean_of(
        [_timeline(seconds, spans_of(events, group_of), group_of, num_groups) for seconds, events in told]
    )
    return Profile(
        plan, tuple(seconds for seconds, _ in told), measured, predicted, _payloads(wiring), rows, calls.result
    )


class _Calls:
    """Steps one after the other, each of the state that the one before returned, and waited for."""

    def __init__(self, executable: Executable, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._executable, self._own = executable, (args, kwargs)
        self._next: tuple[tuple[Any, ...], Mapping[str, Any]] | None = None
        self._kept = changed_in(executable.graph.out_tree)  # objects of the caller's, which the step changes
        self.result: Any = None

    def prepare(self) -> None:
        """The arguments of the next step."""
        if self._next is None:
            self._next = self._own
            return
        args, kwargs = self._executable.next_arguments(*self._next, self.result)
        own, named = self._own
        self._next = (
            tuple(own[k] if k in self._kept else x for k, x in enumerate(args)),
            {name: named[name] if name in self._kept else x for name, x in kwargs.items()},
        )

    def run(self) -> None:
        """The step that is prepared."""
        assert self._next is not None, "it is prepared"
        args, kwargs = self._next
        self.result = self._executable(*args, **kwargs)
        wait_for(self.result)


def _kernel_rows(
    executable: Executable, calls: _Calls, steps: int, job: Processes | None
) -> tuple[KernelRow, ...]:  # fmt: skip
    """What kernels take by kind of operator, of a device and a step in the mean."""

    def run() -> None:
        for _ in range(steps):
            calls.prepare()
            calls.run()

    found = traced_kernels(run, executable.as_text().values())
    if job is not None:
        found = _summed(job, found)
    work = executable.plan.work()
    per_device = 1 / executable.plan.cluster.num_devices
    share = per_device / steps
    rows = []
    for kind in sorted(found, key=lambda kind: -found[kind].seconds):
        done = work.get(kind, KindWork())
        rows.append(
            KernelRow(
                kind, share * found[kind].kernels, share * found[kind].seconds, per_device * done.seconds,
                per_device * done.flops, per_device * done.nbytes,
            )
        )  # fmt: skip
    return tuple(rows)


def _summed(job: Processes, mine: Mapping[OperatorKind, KernelTimes]) -> dict[OperatorKind, KernelTimes]:
    """Of all processes together, on all of them."""

    def merged(said: Sequence[str]) -> str:
        total: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for each in map(json.loads, said):
            for kind, numbers in each.items():
                total[kind] = [a + b for a, b in zip(total[kind], numbers, strict=True)]
        return json.dumps(total)

    told = json.loads(job.combined(json.dumps(mine), merged, "to say what its kernels took"))
    return {kind: KernelTimes(*numbers) for kind, numbers in told.items()}


def _of_job(
    job: Processes | None, seconds: float, events: Sequence[Event], wiring: Wiring
) -> tuple[float, list[Event]]:
    """Of all processes what each first of a stage has seen; the same on all of them."""
    if job is None:
        return seconds, [*events]
    mine = [event for event in events if _is_first(job, event, wiring)]

    def merged(said: Sequence[str]) -> str:
        read = [json.loads(text) for text in said]
        return json.dumps([max(seconds for seconds, _ in read), [event for _, events in read for event in events]])

    seconds, told = json.loads(job.combined(json.dumps([seconds, mine]), merged, "to say how long its programs took"))
    return seconds, [Event(*event) for event in told]


def _is_first(job: Processes, event: Event, wiring: Wiring) -> bool:
    """Of the processes that have devices of a stage, or that receive a copy."""
    there = wiring.processes[event.stage if event.to is None else event.to]
    return bool(job.index == min(there))


def _timeline(seconds: float, spans: Sequence[Span], group_of: Mapping[int, int], num_groups: int) -> Timeline:
    programs: list[TimelineSpan] = []
    copies: list[Copying] = []
    runs: dict[Any, int] = defaultdict(int)
    for span in spans:  # in the same order for every step
        key = span.stage, span.to, span.phase
        if span.to is None:
            where = group_of[span.stage], span.stage
            programs.append(TimelineSpan(*where, span.phase, runs[key], span.start, span.end))
        else:
            copies.append(Copying(span.stage, span.to, "", runs[key], span.start, span.end))
        runs[key] += 1
    return Timeline(seconds, num_groups, tuple(programs), tuple(copies))


def _payloads(wiring: Wiring) -> dict[tuple[int, int], int]:
    """Bytes of the values that go from stage to stage in a step."""
    found: dict[tuple[int, int], int] = defaultdict(int)
    for copy in wiring.instructions.instructions:
        if isinstance(copy, Copy):
            sent = wiring.transfers[copy.crossing]
            found[copy.stage, copy.to] += math.prod(sent.shape) * sent.dtype.itemsize
    return dict(found)
