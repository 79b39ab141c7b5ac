"""A user's `shard_map` without its mesh: the body for all devices at once, as a `vmap` over named axes.

What each device would compute is one element along axes that stand for those of the mesh, and a collective is an
operation along such an axis. So it means the same on any mesh, and its equations are planned like all others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.tracing.interpret import EquationRule, Interpreter, tracing_interpreter

# Beside a computation, these say along which axes devices may differ.
_MARKS = frozenset({"pvary", "pbroadcast", "reduced_vary_cast", "reduced_vary_cast_p"})
_SUMS = frozenset({"psum_invariant"})
_GATHERS = frozenset({"all_gather_invariant", "all_gather_reduced"})


def unmapped(params: Mapping[str, Any], calls: Mapping[str, str]) -> Callable[..., list[Any]]:
    """The function of whole arrays that a `shard_map` with these parameters computes.

    `calls` names the parameter that holds what a primitive calls.
    """
    mesh, jaxpr = params["mesh"], params["jaxpr"]
    manual = params.get("manual_axes", params.get("newly_manual_axes", frozenset(mesh.axis_names)))
    axes = [axis for axis in mesh.axis_names if axis in manual]
    sizes = {axis: mesh.shape[axis] for axis in axes}

    def run(*operands: Any) -> list[Any]:
        in_specs = [_axes_of_dims(spec, x.ndim) for spec, x in zip(params["in_specs"], operands, strict=True)]
        pieces = [_cut(x, dims, axes, sizes) for x, dims in zip(operands, in_specs, strict=True)]
        function: Callable[..., Any] = _interpreter(calls).function_of(jaxpr)
        for axis in reversed(axes):
            in_axes = tuple(0 if any(axis in dim for dim in dims) else None for dims in in_specs)
            function = jax.vmap(function, in_axes, 0, axis_name=axis, axis_size=sizes[axis])
        results = function(*pieces)
        return [
            _join(x, _axes_of_dims(spec, x.ndim - len(axes)), axes)
            for x, spec in zip(results, params["out_specs"], strict=True)
        ]

    return run


def _axes_of_dims(spec: Any, rank: int) -> list[tuple[str, ...]]:
    """Mesh axes by dimension, major first."""
    dims = [() if names is None else (names,) if isinstance(names, str) else tuple(names) for names in spec]
    return dims + [()] * (rank - len(dims))


def _cut(x: Any, dims: Sequence[tuple[str, ...]], axes: Sequence[str], sizes: Mapping[str, int]) -> Any:
    """[whole dimensions] -> [the axes that cut it, in the order of `axes`; dimensions of a piece]."""
    shape: list[int] = []
    at: dict[str, int] = {}
    for names, size in zip(dims, x.shape, strict=True):
        for name in names:
            at[name] = len(shape)
            shape.append(sizes[name])
        shape.append(size // math.prod(sizes[name] for name in names))
    front = [at[axis] for axis in axes if axis in at]
    return x.reshape(shape).transpose(*front, *(i for i in range(len(shape)) if i not in front))


def _join(x: Any, dims: Sequence[tuple[str, ...]], axes: Sequence[str]) -> Any:
    """The inverse; along axes that no dimension names, all devices have the same, and the first is taken."""
    used = {name for names in dims for name in names}
    x = x[tuple(slice(None) if axis in used else 0 for axis in axes)]
    front = [axis for axis in axes if axis in used]
    order: list[int] = []
    shape: list[int] = []
    for d, names in enumerate(dims):
        order += [*(front.index(name) for name in names), len(front) + d]
        shape.append(math.prod(x.shape[i] for i in order[len(order) - len(names) - 1 :]))
    return x.transpose(order).reshape(shape)


def _interpreter(calls: Mapping[str, str]) -> Interpreter:
    """Of bodies whose values are batched along the named axes."""

    def inside(eqn: Any, name: str) -> Callable[..., list[Any]]:
        return interpreter.function_of(eqn.params[name])

    def gather(eqn: Any, xs: Sequence[Any]) -> Sequence[Any]:
        p = eqn.params
        return [jax.lax.all_gather(x, p["axis_name"], axis=p["all_gather_dimension"], tiled=p["tiled"]) for x in xs]

    rules: dict[str, EquationRule] = {
        **dict.fromkeys(_MARKS, lambda eqn, xs: xs),
        **dict.fromkeys(_SUMS, lambda eqn, xs: [jax.lax.psum(x, eqn.params["axes"]) for x in xs]),
        **dict.fromkeys(_GATHERS, gather),
        "scan": lambda eqn, xs: _scan(inside(eqn, "jaxpr"), eqn.params, xs),
        "while": lambda eqn, xs: _while(inside(eqn, "cond_jaxpr"), inside(eqn, "body_jaxpr"), eqn.params, xs),
        "cond": lambda eqn, xs: jax.lax.switch(xs[0], [*map(interpreter.function_of, eqn.params["branches"])], *xs[1:]),
        **{name: lambda eqn, xs: inside(eqn, calls[eqn.primitive.name])(*xs) for name in calls},
        "shard_map": lambda eqn, xs: unmapped(eqn.params, calls)(*xs),
    }
    # A literal's own value may name the mesh that is taken away; an array of NumPy names none.
    interpreter = tracing_interpreter(rules, lambda atom: np.asarray(atom.val, atom.aval.dtype))
    return interpreter


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """How many constants and carries a scan has: among its first operands, in this order."""
    if "ft_in" in params:  # jax 0.12
        consts, carries, _ = params["ft_in"].unpack()
        return len(consts), len(carries)
    return params["num_consts"], params["num_carry"]


def _scan(body: Callable[..., list[Any]], params: Mapping[str, Any], operands: Sequence[Any]) -> list[Any]:
    consts, carries = scan_counts(params)
    fixed, start, xs = operands[:consts], operands[consts : consts + carries], operands[consts + carries :]

    def one_round(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        results = body(*fixed, *carry, *x)
        return results[:carries], results[carries:]

    start = [jnp.asarray(x) for x in start]
    end, ys = jax.lax.scan(one_round, start, list(xs), length=params["length"], reverse=params["reverse"])
    return [*end, *ys]


def _while(
    condition: Callable[..., list[Any]], body: Callable[..., list[Any]], params: Mapping[str, Any], operands: Any
) -> list[Any]:
    first, second = params["cond_nconsts"], params["body_nconsts"]
    of_condition, of_body, start = (
        operands[:first],
        operands[first : first + second],
        operands[first + second :],
    )
    return list(
        jax.lax.while_loop(
            lambda carry: condition(*of_condition, *carry)[0], lambda carry: body(*of_body, *carry), list(start)
        )
    )
