"""Building graphs: equations appended one by one, or from a jaxpr with every call inlined."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core
from jax.extend import source_info_util
from jax.interpreters import partial_eval

from autopar.errors import TraceError
from autopar.ir.graph import Callback, Equation, Literal, Operand, Phase, Rounds, Value
from autopar.ops.cudnn_calls import TAKEN_OVER
from autopar.tracing import loop_callbacks
from autopar.tracing.axis_collectives import unmapped
from autopar.tracing.interpret import Interpreter, opened

# Primitives that call a jaxpr, and the parameter that holds it.
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_lin": "call_jaxpr",
    "custom_vmap_call": "call",
    "custom_partitioning": "call",  # of whole arrays, where no rule of the user's says how it is cut
    "composite": "jaxpr",
    "linear_call": "callee",
    "remat_opt": "fwd_jaxpr",
    "call": "call_jaxpr",
    "custom_jvp_call_jaxpr": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",
    "xla_metadata_call": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "remat": "jaxpr",
}
_REDUCTIONS = {"psum": jax.lax.reduce_sum, "pmax": jax.lax.reduce_max, "pmin": jax.lax.reduce_min}
COND = "cond"
LINEAR_SOLVE = "custom_linear_solve"  # calls one of several
SHARD_MAP = "shard_map"
REMAT = frozenset({"remat2", "checkpoint", "remat"})
_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
_MAX_FRAMES = 1000  # as deep as Python goes
_AGAIN = "rematted_computation"  # in the name stack of what `jax.checkpoint` computes again
_TRANSFORM = re.compile(r"(transpose|jvp)\(")


class _Where(NamedTuple):
    """Of an equation: its name stack, its line, and its phase where that is given."""

    stack: str
    source: str
    given_phase: Phase | None

    @property
    def phase(self) -> Phase:
        """What is given, or else what the name stack says."""
        return self.given_phase or _phase(self.stack)


class Builder:
    """Collects equations while values are numbered in order of creation."""

    def __init__(self, first_id: int = 0, *, counting: bool = False, least_sum_bytes: int = 4) -> None:
        self.counting = counting  # whether "all" and "any" become counts, which are sums
        self.least_sum_bytes = least_sum_bytes  # of the values, see `Value`
        self.origin = (-1, 0)  # of the equations that are added
        self.equations: list[Equation] = []
        self.callbacks: list[Callback] = []
        self.constants: dict[Value, Any] = {}
        self._next = first_id

    def value(self, aval: Any) -> Value:
        self._next += 1
        dtype = aval.dtype
        if not jnp.issubdtype(dtype, jax.dtypes.extended):
            dtype = np.dtype(dtype)
        weak_type = bool(getattr(aval, "weak_type", False))
        return Value(self._next - 1, tuple(aval.shape), dtype, weak_type, self.least_sum_bytes)

    def add(
        self,
        primitive: Any,
        params: Mapping[str, Any],
        inputs: Sequence[Operand],
        avals: Sequence[Any],
        phase: Phase,
        source: str,
        rematerialized: bool = False,
    ) -> tuple[Value, ...]:
        outputs = tuple(self.value(aval) for aval in avals)
        number = len(self.equations)
        self.equations.append(
            Equation(number, primitive, params, tuple(inputs), outputs, phase, source, self.origin, rematerialized)
        )
        return outputs

    def inline(
        self,
        jaxpr: Any,
        consts: Sequence[Any],
        args: Sequence[Operand],
        stack: str = "",
        source: str = "",
        phase: Phase | None = None,
    ) -> list[Operand]:
        """Append the equations of a jaxpr applied to `args`; returns its results.

        `stack` and `source` are those of the call; with a given `phase`, all equations have that and the call's source.
        """

        def literal(atom: Any) -> Operand:
            aval: Any = atom.aval
            if aval.shape:
                return self.constant(np.asarray(atom.val), aval)
            return Literal(atom.val, aval.dtype, bool(getattr(aval, "weak_type", False)))

        def apply(eqn: Any, inputs: Sequence[Operand]) -> Sequence[Operand]:
            here = f"{stack}/{eqn.source_info.name_stack}"
            where = source if phase is not None else source_of(eqn) or source
            return self._applied(eqn, list(inputs), _Where(here, where, phase))

        constants = [self.constant(const, var.aval) for var, const in zip(jaxpr.constvars, consts, strict=True)]
        return Interpreter({}, apply, literal).run(jaxpr, constants, args)

    def _applied(self, eqn: Any, inputs: list[Operand], at: _Where) -> Sequence[Operand]:
        """The results of an equation of a jaxpr, whose calls are inlined."""
        rule = _TAKEN_APART.get(eqn.primitive.name)
        results = None if rule is None else rule(self, eqn, inputs, at)
        return self.as_it_stands(eqn, eqn.params, inputs, at) if results is None else results

    def as_it_stands(
        self, eqn: Any, params: Mapping[str, Any], inputs: Sequence[Operand], at: _Where
    ) -> Sequence[Operand]:
        """The results of one equation, perhaps with other parameters."""
        avals = [var.aval for var in eqn.outvars]
        return self.add(eqn.primitive, params, inputs, avals, at.phase, at.source, _AGAIN in at.stack)

    def inlined(self, body: Any, inputs: Sequence[Operand], at: _Where) -> Sequence[Operand]:
        """The results of a body, closed or not, that an equation calls."""
        return self.inline(*opened(body), inputs, at.stack, at.source, at.given_phase)

    def traced(self, function: Callable[..., Sequence[Any]], inputs: Sequence[Operand], at: _Where) -> list[Operand]:
        """The results of a function of arrays that does what an equation does."""
        closed, values = trace_emission(function, inputs)
        return self.inline(closed.jaxpr, closed.consts, values, at.stack, at.source, at.phase)

    def known_number(self, operand: Operand) -> int | None:
        """The integer that an operand is whatever the inputs are: a literal, or computed from such alone."""
        makers: dict[Operand, Equation] = {}

        def known(operand: Operand) -> Any:
            if isinstance(operand, Literal):
                return jnp.asarray(operand.value, operand.dtype)
            maker = makers.get(operand)
            if maker is None or any(x.shape for x in (*maker.inputs, *maker.outputs)) or len(maker.outputs) > 1:
                return None
            operands = [known(x) for x in maker.inputs]
            if any(x is None for x in operands):
                return None
            result = maker.primitive.bind(*operands, **maker.params)
            return result[0] if maker.primitive.multiple_results else result

        if not isinstance(operand, Literal):
            makers.update((v, eqn) for eqn in self.equations for v in eqn.outputs)
        number = known(operand)
        return None if number is None else int(number)

    def constant(self, const: Any, aval: Any) -> Value:
        value = self.value(aval)
        self.constants[value] = const
        return value

    def fence(self, inputs: Sequence[Operand], phase: Phase, source: str) -> list[Operand]:
        values = [v for v in inputs if isinstance(v, Value)]
        avals = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in values]
        fenced = iter(self.add(barrier(), {}, values, avals, phase, source))
        return [next(fenced) if isinstance(v, Value) else v for v in inputs]


@functools.cache
def barrier() -> Any:
    """The primitive of `jax.lax.optimization_barrier`, which has no parameters."""
    return jax.make_jaxpr(jax.lax.optimization_barrier)(0.0).jaxpr.eqns[0].primitive


# How equations of a primitive are taken apart. Where the result is None, the equation is taken as it stands.


def _call(builder: Builder, eqn: Any, inputs: list[Operand], at: _Where) -> Sequence[Operand] | None:
    params, name = eqn.params, eqn.primitive.name
    body = params.get(CALLS[name])
    if body is None or params.get("sharding_rule") is not None:
        return None
    if name in REMAT and params.get("differentiated") and params.get("prevent_cse", True):
        inputs = builder.fence(inputs, at.phase, at.source)
    return builder.inlined(body, inputs, at)


def _branch(builder: Builder, eqn: Any, inputs: list[Operand], at: _Where) -> Sequence[Operand] | None:
    """The branch that is known to be taken, or a selection where none computes anything."""
    branches = eqn.params["branches"]
    index = builder.known_number(inputs[0])
    if index is not None:
        return builder.inlined(branches[min(max(index, 0), len(branches) - 1)], inputs[1:], at)
    if any(branch.jaxpr.eqns for branch in branches):
        return None
    functions = [jex_core.jaxpr_as_fun(branch) for branch in branches]

    def select(index: Any, *xs: Any) -> list[Any]:
        each = zip(*(function(*xs) for function in functions), strict=True)
        return [jax.lax.select_n(index, *cases) for cases in each]

    return builder.traced(select, inputs, at)


def _linear_solve(builder: Builder, eqn: Any, inputs: list[Operand], at: _Where) -> Sequence[Operand]:
    body, operands = _solve_of(eqn.params, inputs)
    return builder.inlined(body, operands, at)


def _shard_map(builder: Builder, eqn: Any, inputs: list[Operand], at: _Where) -> Sequence[Operand]:
    return builder.inlined(_unmapped(eqn, at.source), inputs, at)


def _take_over(builder: Builder, eqn: Any, inputs: list[Operand], at: _Where) -> Sequence[Operand] | None:
    function = TAKEN_OVER[eqn.primitive.name](eqn.params, [operand.shape for operand in inputs])
    return None if function is None else builder.traced(function, inputs, at)


def _call_back(builder: Builder, eqn: Any, inputs: list[Operand], at: _Where) -> Sequence[Operand]:
    builder.callbacks.append(_callback(eqn.primitive, eqn.params, inputs, at.source))
    return ()


def _scan(builder: Builder, eqn: Any, inputs: list[Operand], at: _Where) -> Sequence[Operand] | None:
    """Without its callbacks, which are called once it is over."""
    if not loop_callbacks.calls_back(eqn):
        return None
    silenced = loop_callbacks.Silenced(eqn.params, CALLS)
    results = builder.traced(silenced.run, inputs, at)
    builder.callbacks.append(_rounds(silenced.rounds, iter(results[len(eqn.outvars) :]), at.source))
    return results[: len(eqn.outvars)]


def _while(builder: Builder, eqn: Any, inputs: list[Operand], at: _Where) -> Sequence[Operand]:
    params, inputs = _without_unread(eqn.params, inputs)
    return builder.as_it_stands(eqn, params, inputs, at)


def _rev(builder: Builder, eqn: Any, inputs: list[Operand], at: _Where) -> Sequence[Operand] | None:
    """Nothing to do along dimensions of 1, as in gradients of 1 x 1 convolutions.

    XLA sees that, too, and then that operand and result are the same.
    """
    return inputs if all(inputs[0].shape[d] == 1 for d in eqn.params["dimensions"]) else None


def _reshape(builder: Builder, eqn: Any, inputs: list[Operand], at: _Where) -> Sequence[Operand] | None:
    """That of other dimensions' order, in the gradient of a grouped convolution, as two equations."""
    order, sizes = eqn.params["dimensions"], eqn.params["new_sizes"]
    if order is None:
        return None
    return builder.traced(lambda x: [jax.lax.reshape(jax.lax.transpose(x, order), sizes)], inputs, at)


def _reduce_axes(builder: Builder, eqn: Any, inputs: list[Operand], at: _Where) -> Sequence[Operand] | None:
    """A collective over axes of which `vmap` has made dimensions, which have numbers instead of names."""
    axes, reduce = eqn.params["axes"], _REDUCTIONS[eqn.primitive.name]
    if eqn.params.get("axis_index_groups") is not None or not all(isinstance(axis, int) for axis in axes):
        return None
    return builder.traced(lambda *xs: [reduce(x, axes) for x in xs], inputs, at)


def _count(builder: Builder, eqn: Any, inputs: list[Operand], at: _Where) -> Sequence[Operand] | None:
    """ "All" and "any" as a count, where the builder wants these."""
    if not builder.counting or inputs[0].dtype != np.bool_:
        return None
    every = eqn.primitive.name == "reduce_and"

    def count(x: Any) -> list[Any]:
        number = jax.lax.reduce_sum((~x if every else x).astype(jnp.int32), eqn.params["axes"])
        return [number == 0 if every else number > 0]

    return builder.traced(count, inputs, at)


_TAKEN_APART: dict[str, Callable[[Builder, Any, list[Operand], _Where], Sequence[Operand] | None]] = {
    **dict.fromkeys(CALLS, _call),
    **dict.fromkeys(loop_callbacks.CALLBACKS, _call_back),
    **dict.fromkeys(_REDUCTIONS, _reduce_axes),
    COND: _branch,
    LINEAR_SOLVE: _linear_solve,
    SHARD_MAP: _shard_map,
    "scan": _scan,
    "while": _while,
    "rev": _rev,
    **dict.fromkeys(TAKEN_OVER, _take_over),
    "reshape": _reshape,
    "reduce_and": _count,
    "reduce_or": _count,
}


def _callback(primitive: Any, params: Mapping[str, Any], inputs: Sequence[Operand], source: str) -> Equation:
    return Equation(-1, primitive, params, tuple(inputs), (), Phase.UPDATE, source)


def _rounds(rounds: loop_callbacks.Loop, given: Iterator[Operand], source: str) -> Rounds:
    callbacks: list[Callback] = []
    for call in rounds.calls:
        if isinstance(call, loop_callbacks.Loop):
            callbacks.append(_rounds(call, given, source))
            continue
        inputs = [
            next(given) if literal is None else Literal(literal.val, literal.aval.dtype) for literal in call.operands
        ]
        callbacks.append(_callback(call.primitive, call.params, inputs, source))
    return Rounds(rounds.length, rounds.reverse, tuple(callbacks))


def _without_unread(params: Mapping[str, Any], inputs: list[Operand]) -> tuple[Mapping[str, Any], list[Operand]]:
    """A `while` without what in its body is dead, and the constants that only this read: JAX leaves both in."""
    body, first = params["body_jaxpr"], params["cond_nconsts"]
    count = params["body_nconsts"]
    carries = [True] * len(body.out_avals)
    jaxpr, used = partial_eval.dce_jaxpr(body.jaxpr, carries, instantiate=[False] * count + carries)
    kept = [x for x, read in zip(inputs[first : first + count], used, strict=False) if read]
    closed = jex_core.ClosedJaxpr(jaxpr, body.consts)
    operands = [*inputs[:first], *kept, *inputs[first + count :]]
    return {**params, "body_jaxpr": closed, "body_nconsts": len(kept)}, operands


def _solve_of(params: Mapping[str, Any], inputs: Sequence[Operand]) -> tuple[Any, list[Operand]]:
    """The user's solver of a `custom_linear_solve`, and its inputs: each of the functions comes with constants.

    Differentiation has used the others.
    """
    lengths = params["const_lengths"]
    first = lengths.matvec + lengths.vecmat
    end = first + lengths.solve
    return params["jaxprs"].solve, [*inputs[first:end], *inputs[end + lengths.transpose_solve :]]


def _unmapped(eqn: Any, source: str) -> Any:
    """The body of a `shard_map` for all devices at once: a closed jaxpr over whole arrays."""
    specs = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in eqn.invars]
    try:
        with source_info_util.user_context(eqn.source_info.traceback):
            return jax.make_jaxpr(unmapped(eqn.params, CALLS))(*specs)
    except Exception as error:
        raise TraceError(
            f"the shard_map at {source or 'an unknown line'} cannot be taken apart into array operations: {error}. "
            "Call its body on whole arrays in the step, and let the plan shard them, or leave it to jax.jit outside."
        ) from error


def source_of(eqn: Any) -> str:
    """The user's line that a JAX equation comes from, with the line of an installed package that it led to, or ""."""
    text = source_info_util.summarize(eqn.source_info)
    if not text or "unknown" in text.lower():
        return ""
    if not is_library(text):
        return text
    frames = reversed(source_info_util.summarize(eqn.source_info, num_frames=_MAX_FRAMES).splitlines())
    own = next((frame for frame in frames if not is_library(frame)), None)
    if own is None:
        return "" if text.startswith(_PACKAGE) else text
    return own if text.startswith(_PACKAGE) else f"{own}, in {text}"


def is_library(frame: str) -> bool:
    """Whether a file, or a frame that begins with it, is of this package or of an installed one."""
    return frame.startswith(_PACKAGE) or "/site-packages/" in frame or "/dist-packages/" in frame


def _phase(name_stack: str) -> Phase:
    """The outermost differentiation decides: `transpose(jvp(..))` backward, `jvp(..)` forward, else neither."""
    match = _TRANSFORM.search(name_stack)
    if match is None:
        return Phase.UPDATE
    return Phase.BACKWARD if match.group(1) == "transpose" else Phase.FORWARD


def gradient_inside(params: Mapping[str, Any]) -> str | None:
    """The user's line of a gradient that the body of a loop or branch computes for itself, None if there is none."""
    for jaxpr in jex_core.jaxprs_in_params(params):
        for eqn in jaxpr.eqns:
            if _phase(str(eqn.source_info.name_stack)) is Phase.BACKWARD:
                return source_of(eqn) or "an unknown line"
            line = gradient_inside(eqn.params)
            if line is not None:
                return line
    return None


def live_jaxpr(closed: Any) -> Any:
    """The jaxpr of a closed one without what its results do not need, operands that a loop or branch never reads too.

    Such an operand is of no cut: where it holds examples, nothing could be split.
    """
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.out_avals), instantiate=True)
    return jaxpr


def live_equations(equations: Sequence[Equation], outputs: Sequence[Operand]) -> list[Equation]:
    """The equations that some output depends on, in order."""
    needed = {v for v in outputs if isinstance(v, Value)}
    kept = []
    for eqn in reversed(equations):
        if any(v in needed for v in eqn.outputs):
            needed.update(eqn.values)
            kept.append(eqn)
    return kept[::-1]


def trace_emission(emit: Callable[..., Sequence[Any]], operands: Sequence[Operand]) -> tuple[Any, list[Value]]:
    """Trace a rule's emission on abstract operands of the given shapes; literals stay literals.

    Returns the closed jaxpr over the operands that are `Value`s, and those operands.
    """
    values = [v for v in operands if isinstance(v, Value)]

    def call(*leaves: Any) -> Sequence[Any]:
        supply = iter(leaves)
        return emit(*[next(supply) if isinstance(v, Value) else v.value for v in operands])

    specs = [jax.ShapeDtypeStruct(v.shape, v.dtype, weak_type=v.weak_type) for v in values]
    return jax.make_jaxpr(call)(*specs), values
