"""Steps run with their instructions timed."""

from __future__ import annotations

import functools
import gc
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
    calls, recording = _Calls(executable, args, kwargs), Recording(executable)
    recorded: list[tuple[float, list[Event]]] = []
    gc.collect()  # else what planning has left is searched for garbage in the midst of a step
    with recording:
        for _ in range(_WARM_UP + steps):
            calls.prepare()
            recording.begin()
            calls.run()
            recorded.append(recording.ended())
    rows = _kernel_rows(executable, calls, steps) if kernels else ()
    lines = [recording.timeline(*each) for each in recorded[_WARM_UP:]]
    return Profile(
        executable.plan, tuple(line.seconds for line in lines), mean_of(lines), recording.predicted,
        _payloads(executable._worker.wiring), rows, calls.result,
    )  # fmt: skip


class Recording:
    """Steps of an executable of which is recorded when instructions begin and end.

    A context: what is called in it is recorded. All processes of a job make and call it together.
    """

    def __init__(self, executable: Executable) -> None:
        self._plan, self._worker, self._job = executable.plan, executable._worker, this_job()
        self._num_groups = len(groups := ReportRecord(executable.plan, None).groups)
        self._group_of = {stage: k for k, group in enumerate(groups) for stage in group.stages}
        self._recorder: Recorder | None = None
        self._began = 0.0

    @functools.cached_property
    def predicted(self) -> Timeline:
        """By the plan, which may have to be priced again for it."""
        return played_timeline(*self._plan.played())

    def __enter__(self) -> Recording:
        worker = self._worker
        channel = None if worker.mail is None else worker.mail.channel
        worker.recorder = self._recorder = Recorder(worker.wiring.instructions.instructions, self._group_of, channel)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._recorder is not None, "it was entered"
        self._worker.recorder = None
        self._recorder.close()

    def begin(self) -> None:
        """The next step, whose arguments are there."""
        assert self._recorder is not None, "it was entered"
        if self._job is not None:
            self._job.combined("", lambda _: "", "to begin a step together")
        self._recorder.begin()
        self._began = time.perf_counter()

    def ended(self) -> tuple[float, list[Event]]:
        """The seconds of the step, whose results are there, and what this process has seen of it."""
        assert self._recorder is not None, "it was entered"
        seconds, events = time.perf_counter() - self._began, self._recorder.ended()
        return max([seconds, *(event.ended for event in events)]), events  # threads see ends a bit late

    def timeline(self, seconds: float, events: Sequence[Event]) -> Timeline:
        """Of a step of which this process has seen so much, on all processes of a job."""
        seconds, told = _of_job(self._job, seconds, events, self._worker.wiring)
        in_turns = all(event.is_waited_for for event in told if event.to is None)
        num_groups = self.predicted.num_groups if in_turns else self._num_groups
        return _timeline(seconds, spans_of(told, self._group_of), self._group_of, num_groups)

    def bubble(self) -> float | None:
        """The share of the groups' time in which they ran no program, of the step that has ended; None: it ran none.

        On all processes of a job.
        """
        line = self.timeline(*self.ended())
        return line.bubble if line.programs else None


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


def _kernel_rows(executable: Executable, calls: _Calls, steps: int) -> tuple[KernelRow, ...]:
    """What kernels take by kind of operator, of a device and a step in the mean."""

    def run() -> None:
        for _ in range(steps):
            calls.prepare()
            calls.run()

    found = traced_kernels(run, executable.as_text().values())
    if (job := this_job()) is not None:
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
