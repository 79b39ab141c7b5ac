"""Pallas kernels: dimensions of the grid are cut in whole blocks, where the specifications of blocks say that they can.

A dimension of the grid is a factor if its index goes unchanged into one dimension of every result, and into at most one
of each operand; if no other index depends on it; if blocks fill these dimensions of the arrays; and if the kernel does
not ask where in that dimension it is. Then a piece of the arrays is the same kernel with fewer steps. Dimensions whose
blocks are met several times, as where sums are formed, stay whole, and so does all else.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core

from autopar.ir.graph import Equation
from autopar.ir.rule import BodyKernel, DimMap, Local, Rule, bind
from autopar.passes.rules.building import (
    Factors,
    RuleBuilder,
    local_shape,
    opaque_kernel,
    replicated,
)
from autopar.passes.rules.loop_kernels import unit_of


@dataclasses.dataclass(frozen=True)
class _Block:
    """Of one dimension of an array."""

    step: int | None  # the dimension of the grid whose index is the block's, unchanged; None: another index
    uses: frozenset[int]  # all dimensions of the grid on which the index depends
    size: int | None  # elements; None: blocks that may lie anywhere


def _pallas_call(eqn: Equation) -> Rule:
    mapping = eqn.params["grid_mapping"]
    grid = mapping.grid
    known = all(isinstance(n, int) for n in grid) and mapping.grid_names is None and eqn.params.get("mesh") is None
    if not known or len(eqn.inputs) != mapping.num_index_operands + mapping.num_inputs:
        return replicated(eqn)  # a grid of sizes that are computed, or references to arrays
    arrays = [_blocks(each, len(grid)) for each in mapping.block_mappings]
    shapes = [tuple(each.array_aval.shape) for each in mapping.block_mappings]
    results = range(mapping.num_inputs, len(arrays))
    shared = [(i - mapping.num_index_operands, mapping.num_inputs + o) for i, o in eqn.params["input_output_aliases"]]
    cut = [
        g for g in range(len(grid))
        if _can_be_cut(g, grid[g], arrays, shapes, results)
        and _is_free(eqn, g)
        and all(i >= 0 and _where(g, arrays[i]) == _where(g, arrays[o]) for i, o in shared)
    ]  # fmt: skip
    if not cut:
        whole = replicated(eqn)
        kernel = _kernel(eqn, [*whole.inputs, *whole.outputs], {})
        return dataclasses.replace(whole, unit=unit_of((kernel,)), kernels=(kernel,))
    factors = Factors()
    steps = {g: factors.new(grid[g]) for g in cut}

    def dims(blocks: Sequence[_Block], shape: Sequence[int]) -> DimMap:
        return tuple(
            (*steps[b.step], *factors.new_whole(b.size or 1)) if b.step in steps else factors.new_whole(n)
            for b, n in zip(blocks, shape, strict=True)
        )

    maps = [dims(blocks, shape) for blocks, shape in zip(arrays, shapes, strict=True)]
    prefetched = [factors.dims(v.shape, range(len(v.shape))) for v in eqn.inputs[: mapping.num_index_operands]]
    inputs, outputs = [*prefetched, *maps[: mapping.num_inputs]], maps[mapping.num_inputs :]

    def emit(local: Local, eqn: Equation, operands: Sequence[Any]) -> Sequence[Any]:
        counts = tuple(
            math.prod(local.size(f) for f in steps[g]) if g in steps else n for g, n in enumerate(grid)
        )  # fmt: skip
        pieces = [
            each.replace(array_aval=jax.core.ShapedArray(local_shape(local, dims), each.array_aval.dtype))
            for each, dims in zip(mapping.block_mappings, maps, strict=True)
        ]
        share = math.prod(counts) / math.prod(grid)
        return bind(
            eqn, operands, grid_mapping=mapping.replace(grid=counts, block_mappings=tuple(pieces)),
            out_avals=tuple(each.array_aval for each in pieces[mapping.num_inputs :]),
            cost_estimate=_shared(eqn.params.get("cost_estimate"), share),
        )  # fmt: skip

    kernel = _kernel(eqn, [*inputs, *outputs], steps)
    return factors.rule(inputs, outputs, emit=emit, unit=unit_of((kernel,)), kernels=(kernel,))


def _blocks(mapping: Any, num_steps: int) -> list[_Block]:
    """Where the blocks of an array lie, by its dimensions."""
    jaxpr = mapping.index_map_jaxpr.jaxpr
    steps = {var: g for g, var in enumerate(jaxpr.invars[:num_steps])}
    uses: dict[Any, frozenset[int]] = {var: frozenset({g}) for var, g in steps.items()}

    def read(atom: Any) -> frozenset[int]:
        return frozenset() if isinstance(atom, core.Literal) else uses.get(atom, frozenset())

    for each in jaxpr.eqns:
        on: frozenset[int] = frozenset().union(*(read(atom) for atom in each.invars))
        uses.update(dict.fromkeys(each.outvars, on))
    found = []
    for atom, block in zip(jaxpr.outvars, mapping.block_shape, strict=False):
        step = None if isinstance(atom, core.Literal) else steps.get(atom)
        found.append(_Block(step, read(atom), _block_size(block)))
    return found


def _block_size(block: Any) -> int | None:
    """Elements of a block whose index counts blocks."""
    match type(block).__name__:
        case "int":
            return int(block)
        case "Blocked":
            return int(block.block_size)
        case "Squeezed" | "NoneType":
            return 1
        case "Element" if block.block_size == 1 and block.padding == (0, 0):
            return 1
    return None


def _can_be_cut(
    step: int, count: int, arrays: Sequence[Sequence[_Block]], shapes: Sequence[Sequence[int]], results: Collection[int]
) -> bool:  # fmt: skip
    """Whether the blocks of every array are in pieces where a dimension of the grid is."""
    if count < 2:
        return False
    for k, (blocks, shape) in enumerate(zip(arrays, shapes, strict=True)):
        using = [(b, n) for b, n in zip(blocks, shape, strict=True) if step in b.uses]
        if len(using) > 1 or (not using and k in results):
            return False
        if any(b.step != step or b.size is None or b.size * count != n for b, n in using):
            return False
    return True


def _where(step: int, blocks: Sequence[_Block]) -> list[int]:
    """The dimensions of an array that a dimension of the grid is in."""
    return [d for d, block in enumerate(blocks) if step in block.uses]


def _is_free(eqn: Equation, step: int) -> bool:
    """Whether the steps along a dimension of the grid are independent of one another, and of where they are."""
    mapping = eqn.params["grid_mapping"]
    own = [g for g in range(len(mapping.grid)) if g not in mapping.vmapped_dims]  # the kernel knows no others
    if step not in own:
        return True
    semantics = getattr(eqn.params.get("compiler_params"), "dimension_semantics", None)
    said = str(semantics[own.index(step)]).lower() if semantics else ""
    if mapping.num_scratch_operands and "parallel" not in said:
        return False  # what one step leaves in scratch memory the next may read
    asked = {e.params.get("axis") for e in _equations(eqn.params["jaxpr"]) if e.primitive.name in _PLACES}
    return own.index(step) not in asked


_PLACES = frozenset({"program_id", "num_programs"})


def _equations(jaxpr: Any) -> Iterator[Any]:
    """Of a jaxpr and all jaxprs in it."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for sub in core.jaxprs_in_params(eqn.params):
            yield from _equations(sub)


def _shared(estimate: Any, share: float) -> Any:
    """A piece's part of what the user says that the kernel costs."""
    if estimate is None:
        return None
    named = ("flops", "transcendentals", "bytes_accessed")
    return dataclasses.replace(estimate, **{name: int(getattr(estimate, name) * share) for name in named})


def _kernel(eqn: Equation, maps: Sequence[DimMap], steps: Mapping[int, Sequence[int]]) -> BodyKernel:
    """As the user says what it costs; else by the operations of one step."""
    held = frozenset(f for factors in steps.values() for f in factors)
    estimate, count = eqn.params.get("cost_estimate"), math.prod(eqn.params["grid_mapping"].grid)
    flops = None if estimate is None else float(estimate.flops)
    return opaque_kernel(eqn, maps, held, eqn.params["jaxpr"], times=count, flops=flops)


RULES: Mapping[str, RuleBuilder] = {"pallas_call": _pallas_call}
