"""A user's `shard_map` without its mesh: the body for all devices at once, as a `vmap` over named axes.

What each device would compute is one element along axes that stand for those of the mesh, and a collective is an
operation along such an axis. So it means the same on any mesh, and its equations are planned like all others.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core, source_info_util

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
        function: Callable[..., Any] = lambda *xs: _evaluate(jaxpr, (), xs, calls)  # noqa: E731
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


def _evaluate(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], calls: Mapping[str, str]) -> list[Any]:
    """A body whose values are batched along the named axes; bodies within it likewise."""
    env: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(atom: Any) -> Any:
        if not isinstance(atom, core.Literal):
            return env[atom]
        aval: Any = atom.aval
        return np.asarray(atom.val, aval.dtype)  # the literal itself remembers the mesh

    def function_of(closed: Any) -> Callable[..., list[Any]]:
        is_closed = isinstance(closed, core.ClosedJaxpr)
        inner, inner_consts = (closed.jaxpr, closed.consts) if is_closed else (closed, ())
        return lambda *xs: _evaluate(inner, inner_consts, xs, calls)

    for eqn in jaxpr.eqns:
        name, params = eqn.primitive.name, eqn.params
        operands = [read(atom) for atom in eqn.invars]
        with source_info_util.user_context(eqn.source_info.traceback, name_stack=eqn.source_info.name_stack):
            if name in _MARKS:
                results: Any = operands
            elif name in _SUMS:
                results = [jax.lax.psum(x, params["axes"]) for x in operands]
            elif name in _GATHERS:
                gather = functools.partial(
                    jax.lax.all_gather, axis_name=params["axis_name"], axis=params["all_gather_dimension"]
                )
                results = [gather(x, tiled=params["tiled"]) for x in operands]
            elif name == "shard_map":
                results = unmapped(params, calls)(*operands)
            elif name in calls:
                results = function_of(params[calls[name]])(*operands)
            elif name == "scan":
                results = _scan(function_of(params["jaxpr"]), params, operands)
            elif name == "while":
                results = _while(function_of(params["cond_jaxpr"]), function_of(params["body_jaxpr"]), params, operands)
            elif name == "cond":
                index, *rest = operands
                results = jax.lax.switch(index, [function_of(branch) for branch in params["branches"]], *rest)
            else:
                results = eqn.primitive.bind(*operands, **params)
        if name not in (*_MARKS, *_SUMS, *_GATHERS) and not isinstance(results, list | tuple):
            results = [results]
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


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
        found = body(*fixed, *carry, *x)
        return found[:carries], found[carries:]

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
