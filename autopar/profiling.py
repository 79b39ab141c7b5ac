"""Steps run with their instructions timed."""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from autopar.errors import ArgumentError
from autopar.ir.instructions import Copy
from autopar.planning.details import played_timeline
from autopar.reporting.profile import Profile, Timeline, mean_of
from autopar.reporting.record import Copying, ReportRecord, TimelineSpan
from autopar.runtime.processes import Processes, this_job
from autopar.runtime.recorder import Event, Recorder, Span, spans_of
from autopar.runtime.wiring import Wiring
from autopar.tracing.in_place import changed_in

if TYPE_CHECKING:
    from autopar.executable import Executable


_WARM_UP = 2  # steps: the second is the first of the state that a step has returned


def profile_of(executable: Executable, args: tuple[Any, ...], kwargs: Mapping[str, Any], steps: int) -> Profile:
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
    result: Any = None
    kept = changed_in(executable.graph.out_tree)  # objects of the caller's, which the step changes
    own = args, kwargs
    worker.recorder = recorder
    try:
        for number in range(_WARM_UP + steps):
            if number:
                args, kwargs = executable.next_arguments(args, kwargs, result)
                args = tuple(own[0][k] if k in kept else x for k, x in enumerate(args))
                kwargs = {name: own[1][name] if name in kept else x for name, x in kwargs.items()}
            if job is not None:
                job.combined("", lambda _: "", "to begin a step together")
            recorder.begin()
            began = time.perf_counter()
            result = executable(*args, **kwargs)
            jax.block_until_ready(
                [x for x in jax.tree.leaves(result) if isinstance(x, jax.Array) and x.addressable_shards]
            )
            seconds, events = time.perf_counter() - began, recorder.ended()
            recorded.append((max([seconds, *(event.ended for event in events)]), events))  # threads see ends a bit late
    finally:
        worker.recorder = None
        recorder.close()
    told = [_of_job(job, seconds, events, wiring) for seconds, events in recorded[_WARM_UP:]]
    predicted = played_timeline(*plan.played())
    in_turns = all(event.is_waited_for for _, events in told for event in events if event.to is None)
    num_groups = predicted.num_groups if in_turns else len(groups)
    measured = mean_of(
        [_timeline(seconds, spans_of(events, group_of), group_of, num_groups) for seconds, events in told]
    )
    return Profile(plan, tuple(seconds for seconds, _ in told), measured, predicted, _payloads(wiring), result)


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
