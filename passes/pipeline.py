"""Placement: each equation gets a stage, and each (phase, stage) becomes a program.

1. Forward equations come with their stage (layers are cut along the program order, so stages only rise).
2. A backward equation goes where its cotangents come from, but no later than where the forward values and
   parameters that it uses were last used: that walks down the stages as the backward pass does. Any value may
   cross stages; nothing else is assumed (tied weights and long skips are only more crossings).
3. A sum of partial sums that were made on different stages waits for the update phase: each is accumulated where it
   was made and crosses once a step instead of once a microbatch.
4. Update equations go where most of their operands' bytes are; inputs live where they are used and renewed.
5. Where gradients of parameters are to be apart, the heavy ones of a stage's backward pass, on which no other stage
   waits, are put off, with what only leads to them or follows from them.
6. In the prologue and the update a stage's equations are cut into rounds so that programs never depend on one
   another in a circle (a global gradient norm goes all ways); in the loop stages are monotone and need none.
7. Programs of one stage that follow one another with nothing between them are fused. A backward program that is not
   fused with the forward program of its stage repeats what is in `again` (see `residuals.py`).
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from autopar.ir.graph import Equation, Operand, Phase, StepGraph, Value
from autopar.ir.program import PlacedStep, Program
from autopar.passes.split_backward import IsHeavy, put_off

_Key = tuple[int, int, int]  # of a program: order of phases, order in the phase, stage


def place(
    step: StepGraph, forward_stage: Mapping[int, int], num_stages: int, homes: Mapping[Value, int],
    heavy: IsHeavy | None = None, again: Mapping[Value, Equation] = MappingProxyType({}),
) -> PlacedStep:  # fmt: skip
    """Cut a step into programs.

    `forward_stage` gives the stage of each FORWARD equation by id, `homes` that of inputs that lie somewhere already.
    `heavy`: which equations are worth putting off, where gradients of parameters are to be apart.
    `again`: by value of the forward pass the equation that makes it again where the backward pass is apart.
    """
    stages = _loop_stages(step, forward_stage, num_stages)
    step, stages = _defer_sums(step, stages)
    home = _update_stages(step, stages, homes)
    late = frozenset() if heavy is None else _put_off(step, stages, heavy)
    return _programs(step, stages, home, num_stages, late, again)


def _put_off(step: StepGraph, stages: Mapping[int, int], heavy: IsHeavy) -> frozenset[int]:
    """Step 5: ids of backward equations that are not run with the backward pass, but after it."""
    backward = [e for e in step.equations if e.phase is Phase.BACKWARD and e.id in stages]
    at = {v: stages[e.id] for e in backward for v in e.outputs}
    sent = {v for e in backward for v in e.values if at.get(v, stages[e.id]) != stages[e.id]}
    return put_off(backward, sent, heavy)


def _loop_stages(step: StepGraph, forward_stage: Mapping[int, int], num_stages: int) -> dict[int, int]:
    """Stages of the loop equations (steps 1 and 2)."""
    stages: dict[int, int] = {}
    last_use: dict[Value, int] = {}  # latest stage at which the forward pass has the value
    made: dict[Value, int] = {}  # values of the backward pass
    copied = step.copied

    def use(value: Value, stage: int) -> None:
        reached = [value]
        while reached:
            now = reached.pop()
            if last_use.get(now, -1) < stage:
                last_use[now] = stage
                if now in copied:
                    reached += copied[now].values

    for eqn in step.equations:
        if eqn.phase is Phase.FORWARD and eqn.id not in step.replicable:
            at = [last for v in eqn.values if (last := made.get(v)) is not None]
            stages[eqn.id] = stage = max([forward_stage[eqn.id], *at])
            for v in eqn.values:
                use(v, stage)
            for v in eqn.outputs:
                made[v] = stage
                use(v, stage)
    cotangent: dict[Value, int] = {}
    backward = [e for e in step.equations if e.phase is Phase.BACKWARD and e.id not in step.replicable]
    for eqn in backward:
        bounds = [cotangent[v] for v in eqn.values if v in cotangent]
        bounds += [last_use[v] for v in eqn.values if v in last_use and v is not step.microbatch]  # which all know
        if bounds:
            stages[eqn.id] = stage = min(bounds)
            cotangent.update(dict.fromkeys(eqn.outputs, stage))
    wanted: dict[Value, int] = {}  # latest stage of the backward pass that reads a value
    for eqn in reversed(backward):  # what is made from nothing, such as zeros to add to, is made where it is read
        if eqn.id not in stages:
            stages[eqn.id] = max((wanted[v] for v in eqn.outputs if v in wanted), default=num_stages - 1)
        for v in eqn.values:
            wanted[v] = max(wanted.get(v, 0), stages[eqn.id])
    return stages


def _defer_sums(step: StepGraph, stages: dict[int, int]) -> tuple[StepGraph, dict[int, int]]:
    """Step 3: move linear combinations of several stages' partial sums, and what follows from them, to the update."""
    if step.num_microbatches == 1:
        return step, stages
    made = {v: eqn for eqn in step.equations for v in eqn.outputs}
    moved: set[int] = set()
    for eqn in step.equations:
        if not eqn.phase.in_loop or eqn.id in step.replicable:
            continue
        varying = [v for v in eqn.values if v in step.batched]
        if not varying or not all(v in step.partial for v in varying):
            continue
        producers = [made[v] for v in varying]
        if len({stages[p.id] for p in producers}) > 1 or any(p.id in moved for p in producers):
            moved.add(eqn.id)
    if not moved:
        return step, stages

    next_id = step.next_value_id
    accumulate = dict(step.accumulate)
    summed: dict[Value, Value] = {}  # moved loop value -> its step value
    loop: list[Equation] = []
    update: list[Equation] = []

    def new(value: Value) -> Value:
        nonlocal next_id
        next_id += 1
        return dataclasses.replace(value, id=next_id - 1)

    def whole(value: Operand) -> Operand:
        if not isinstance(value, Value) or value not in step.batched:
            return value
        return summed[value] if value in summed else accumulate.setdefault(value, new(value))

    for eqn in step.equations:
        if eqn.id in moved:
            inputs = tuple(whole(v) for v in eqn.inputs)
            for v in eqn.outputs:
                summed[v] = accumulate.pop(v) if v in accumulate else new(v)
            outputs = tuple(summed[v] for v in eqn.outputs)
            update.append(dataclasses.replace(eqn, inputs=inputs, outputs=outputs, phase=Phase.UPDATE))
        else:
            loop.append(eqn)
    first_update = next((i for i, eqn in enumerate(loop) if eqn.phase is Phase.UPDATE), len(loop))
    equations = (*loop[:first_update], *update, *loop[first_update:])
    kept = {i: stage for i, stage in stages.items() if i not in moved}
    return dataclasses.replace(step, equations=equations, accumulate=accumulate), kept


def _update_stages(step: StepGraph, stages: dict[int, int], homes: Mapping[Value, int]) -> dict[Value, int]:
    """Step 4: completes `stages` for the prologue and the update; returns where inputs and constants live."""
    where: dict[Value, int] = {}  # stage of every value as far as known
    for eqn in step.equations:
        if eqn.id in stages:
            where.update(dict.fromkeys(eqn.outputs, stages[eqn.id]))
    for loop_value, whole in step.accumulate.items():
        where[whole] = where[loop_value]
    for loop_value, pieces in step.keep.items():
        where.update(dict.fromkeys(pieces, where[loop_value]))
    stored = [*step.graph.inputs, *step.constants]
    users: dict[Value, list[Equation]] = defaultdict(list)
    for eqn in step.equations:
        for v in eqn.values:
            users[v].append(eqn)

    first_use: dict[Value, int] = {}  # the first stage whose loop uses a value, through copied equations too
    for eqn in reversed(step.equations):
        if eqn.id in stages and eqn.phase.in_loop:
            at = stages[eqn.id]
        elif eqn.id in step.replicable and (uses := [first_use[v] for v in eqn.outputs if v in first_use]):
            at = min(uses)
        else:
            continue
        for v in eqn.values:
            first_use[v] = min(first_use.get(v, at), at)

    fed = {source: loop_value for loop_value, (source, _) in step.feeds.items()}
    for value in stored:
        value_in_loop = fed.get(value, value)
        if value_in_loop in first_use:
            where[value] = first_use[value_in_loop]
    where.update(homes)

    renewed = {out: step.graph.inputs[i] for k, i in step.graph.carried.items()
               if isinstance(out := step.outputs[k], Value)}  # fmt: skip
    todo = [e for e in step.equations if e.id not in stages and e.id not in step.replicable]
    for eqn in todo:  # a leaf that lies somewhere already is renewed there
        kept = [homes[renewed[v]] for v in eqn.outputs if v in renewed and renewed[v] in homes]
        if kept:
            stages[eqn.id] = kept[0]
            where.update(dict.fromkeys(eqn.outputs, kept[0]))
    for eqn in reversed([e for e in todo if e.phase is Phase.PROLOGUE]):
        user_stages = [first_use[v] for v in eqn.outputs if v in first_use]
        user_stages += [stages[u.id] for v in eqn.outputs for u in users[v] if u.id in stages]
        stages.setdefault(eqn.id, min(user_stages, default=0))
    for eqn in todo:
        if eqn.phase is Phase.PROLOGUE:
            where.update(dict.fromkeys(eqn.outputs, stages[eqn.id]))

    update = [e for e in todo if e.phase is Phase.UPDATE]
    for turn in range(3):  # forwards from gradients, backwards to what they meet, forwards again
        if turn and all(eqn.id in stages for eqn in update):
            break
        for eqn in update:
            _vote(eqn, eqn.values, stages, where)
            for v in eqn.outputs:
                if v in where and v in renewed:
                    where.setdefault(renewed[v], where[v])
        for eqn in reversed(update):
            _vote(eqn, eqn.outputs, stages, where)
            if eqn.id in stages:
                for v in eqn.values:
                    where.setdefault(v, stages[eqn.id])
    for eqn in update:
        stages.setdefault(eqn.id, 0)
        where.update(dict.fromkeys(eqn.outputs, stages[eqn.id]))
    for out, source in renewed.items():
        if out in where and out is not source and source not in homes:
            where[source] = where[out]
    # The loop takes its slices of the batch wherever it wants them; the whole goes where it is read.
    for value in [v for v in stored if v in fed or v not in where]:
        readers = _reading_stages(value, users, stages, step.replicable)
        if readers:
            where[value] = min(readers)
    return {v: where.get(v, 0) for v in stored}


def _reading_stages(
    value: Value, users: Mapping[Value, Sequence[Equation]], stages: Mapping[int, int], replicable: Collection[int]
) -> set[int]:
    """Where a value is read outside of the loop, also through equations that each stage makes for itself."""
    found: set[int] = set()
    seen, todo = {value}, [value]
    while todo:
        for eqn in users.get(todo.pop(), ()):
            if eqn.id in stages:
                if not eqn.phase.in_loop:
                    found.add(stages[eqn.id])
            elif eqn.id in replicable:
                todo += [v for v in eqn.outputs if v not in seen]
                seen.update(eqn.outputs)
    return found


def _vote(eqn: Equation, values: Sequence[Value], stages: dict[int, int], where: dict[Value, int]) -> None:
    """Place an equation where most bytes of the given values are; the first of equals decides."""
    if eqn.id in stages:
        return
    known = [v for v in values if v in where]
    if any(v.shape for v in values) and not any(v.shape for v in known):
        return  # scalars do not decide where arrays go
    if known:
        largest = max(known, key=lambda v: v.nbytes)
        stages[eqn.id] = where[largest]
        for v in eqn.outputs:
            where[v] = stages[eqn.id]


def _programs(
    step: StepGraph, stages: Mapping[int, int], home: Mapping[Value, int], num_stages: int, late: Collection[int],
    again: Mapping[Value, Equation],
) -> PlacedStep:  # fmt: skip
    """Steps 6 and 7; `late` are the equations of step 5."""
    key_of: dict[Value, _Key] = {}
    members: dict[_Key, list[Equation]] = defaultdict(list)
    phases = list(Phase)
    rounds: dict[Value, int] = {}
    copied = step.copied
    outputs = {v for v in step.outputs if isinstance(v, Value)}
    carried_stage = {
        out: home[step.graph.inputs[i]] for k, i in step.graph.carried.items()
        if isinstance(out := step.outputs[k], Value)
    }  # fmt: skip

    def key(phase: Phase, stage: int, round_: int) -> _Key:
        if num_stages == 1:
            if step.num_microbatches == 1:
                return (0, 0, 0)
            if phase.in_loop:
                return (phases.index(Phase.FORWARD), 0, 0)
        if phase is Phase.FORWARD:
            return (phases.index(phase), stage, stage)
        if phase is Phase.WEIGHTS:
            return (phases.index(phase), 0, stage)
        if phase is Phase.BACKWARD:
            if stage == num_stages - 1:
                return (phases.index(Phase.FORWARD), stage, stage)
            return (phases.index(phase), num_stages - stage, stage)
        return (phases.index(phase), round_, stage)

    for eqn in step.equations:
        if eqn.id in step.replicable:
            continue
        stage = stages[eqn.id]
        round_ = 0
        if not eqn.phase.in_loop:
            for v in _through_copies(eqn.values, copied):
                if v in rounds:
                    crosses = key_of[v][2] != stage
                    round_ = max(round_, rounds[v] + crosses)
        where = key(Phase.WEIGHTS if eqn.id in late else eqn.phase, stage, round_)
        members[where].append(eqn)
        for v in eqn.outputs:
            key_of[v] = where
            if not eqn.phase.in_loop:
                rounds[v] = round_
    for v in sorted(outputs & copied.keys(), key=lambda v: v.id):  # the caller wants a batch-free value
        stage = carried_stage.get(v, 0)
        deepest = max(
            (rounds[w] + (key_of[w][2] != stage) for w in _through_copies([v], copied) if w in rounds), default=0
        )
        where = key(Phase.UPDATE, stage, deepest)
        members[where] = members[where]
        key_of[v] = where

    order = sorted(members)
    wanted_copies: dict[_Key, set[Value]] = defaultdict(set)
    for v in outputs & copied.keys():
        wanted_copies[key_of[v]].add(v)
    position = {eqn.id: i for i, eqn in enumerate(step.equations)}
    again_at: dict[int, dict[Value, Equation]] = defaultdict(dict)
    for v, eqn in again.items():
        again_at[stages[eqn.id]][v] = eqn
    full = {}
    for k in order:
        is_apart = phases[k[0]] in (Phase.BACKWARD, Phase.WEIGHTS)  # from the forward program
        here = again_at[k[2]] if is_apart else {}
        full[k] = _updated_early(_with_copies(members[k], wanted_copies[k], copied, here, position))
    needed_by: dict[Value, set[_Key]] = defaultdict(set)
    inputs_of = {}
    for k in order:
        made = {v for eqn in full[k] for v in eqn.outputs}
        inputs: dict[Value, None] = {}
        for eqn in full[k]:
            inputs.update(dict.fromkeys(v for v in eqn.values if v not in made))
        inputs_of[k] = tuple(inputs)
        for v in inputs:
            needed_by[step.loop_values.get(v, v)].add(k)
    for v in outputs:
        needed_by[step.loop_values.get(v, v)].add((-1, -1, -1))

    programs, producer = [], {}
    for index, k in enumerate(order):
        made_here = [v for eqn in full[k] for v in eqn.outputs if key_of.get(v) == k]
        results = tuple(v for v in made_here if needed_by[v])
        phase = phases[k[0]] if full[k] and num_stages * step.num_microbatches > 1 else Phase.UPDATE
        producer.update(dict.fromkeys(results, index))
        name = _name(phase, k, num_stages) if num_stages * step.num_microbatches > 1 else "step"
        copies = frozenset(v for eqn in full[k] for v in eqn.outputs if v in copied or key_of[v] != k)
        programs.append(Program(index, name, phase, k[2], full[k], inputs_of[k], results, copies))
    for whole, v in step.loop_values.items():
        producer[whole] = producer[v]
    return PlacedStep(step, num_stages, tuple(programs), producer, home)


def _updated_early(equations: tuple[Equation, ...]) -> tuple[Equation, ...]:
    """With the updates as soon as what they need is there: gradients that are used need no memory any more."""
    if len({eqn.phase.in_loop for eqn in equations}) < 2:
        return equations
    ready: dict[Value, int] = {}
    when = []
    for position, eqn in enumerate(equations):
        at = position if eqn.phase.in_loop else max((ready[v] for v in eqn.values if v in ready), default=-1)
        ready.update(dict.fromkeys(eqn.outputs, at))
        when.append((at, position))
    return tuple(equations[position] for _, position in sorted(when))


def _name(phase: Phase, key: tuple[int, int, int], num_stages: int) -> str:
    base = phase.value
    if num_stages > 1:
        base += f"_{key[2]}"
    if phase in (Phase.PROLOGUE, Phase.UPDATE) and key[1]:
        base += f"_round{key[1]}"
    return base


def _through_copies(values: Sequence[Value], copied: Mapping[Value, Equation]) -> set[Value]:
    """The values that copied equations are computed from, instead of their results."""
    sources: set[Value] = set()
    seen: set[Value] = set()
    stack = list(values)
    while stack:
        v = stack.pop()
        if v in seen:
            continue
        seen.add(v)
        if v in copied:
            stack.extend(copied[v].values)
        else:
            sources.add(v)
    return sources


def _with_copies(
    equations: Sequence[Equation], wanted: set[Value], copied: Mapping[Value, Equation],
    again: Mapping[Value, Equation], position: Mapping[int, int],
) -> tuple[Equation, ...]:  # fmt: skip
    """The equations of a program behind those that it needs of `copied`, which no microbatch enters, and of `again`.

    Each of `again` comes right before what first reads its result. `position` is that in the step, by equation id.
    """
    copies: dict[int, Equation] = {}
    when = {eqn.id: (position[eqn.id], 1, 0) for eqn in equations}
    stack = [(v, when[eqn.id]) for eqn in equations for v in eqn.values] + [(v, (-1, 0, 0)) for v in wanted]
    while stack:
        v, reader = stack.pop()
        eqn = again.get(v) or copied.get(v)
        if eqn is None:
            continue
        # Copies may depend on equations of the same program (a prologue's sum, then a cheap function of it).
        at = (reader[0], 0, position[eqn.id]) if v in again else (position[eqn.id], 1, 0)
        if eqn.id not in copies or at < when[eqn.id]:
            copies[eqn.id], when[eqn.id] = eqn, at
            stack.extend((u, at) for u in eqn.values)
    merged = sorted([*equations, *copies.values()], key=lambda eqn: when[eqn.id])
    return tuple(merged)
