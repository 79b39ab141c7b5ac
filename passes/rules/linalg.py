"""Linear algebra and Fourier transforms: a batch of matrices splits, a matrix is whole.

The right-hand sides of a triangular system are columns (or rows) that are solved for one by one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax.experimental.layout import Layout, with_layout_constraint

from autopar.ir.graph import Equation
from autopar.ir.rule import DimMap, Local, Rule, bind
from autopar.passes.rules.building import Factors, RuleBuilder, linear_sets, work_per_point


def _batched(matrix_rank: Callable[[Equation], int], *linear: Iterable[int]) -> RuleBuilder:
    """Leading dimensions are a batch; the last `matrix_rank` of the first operand, and what follows, are whole."""

    def build(eqn: Equation) -> Rule:
        shape = eqn.inputs[0].shape
        rank = len(shape) - matrix_rank(eqn)
        factors = Factors()
        batch = factors.dims(shape[:rank])

        def place(sizes: Sequence[int]) -> DimMap:
            return batch + factors.dims(sizes[rank:], range(len(sizes) - rank))

        inputs = [place(operand.shape) for operand in eqn.inputs]
        outputs = [place(value.shape) for value in eqn.outputs]
        # Cubic in the matrix, as the products that these factorisations are made of.
        work = float(math.prod(shape) * max((1, *shape[rank:])))
        return factors.rule(inputs, outputs, linear=linear_sets(eqn, *linear), flops=work_per_point(work, factors))

    return build


def _triangular_solve(eqn: Equation) -> Rule:
    matrix, sides = (operand.shape for operand in eqn.inputs)
    batch_rank = len(sides) - 2
    factors = Factors()
    batch = factors.dims(sides[:batch_rank])
    solved, free = factors.new_whole(matrix[-1]), factors.new(sides[-1 if eqn.params["left_side"] else -2])
    dims: DimMap = (*batch, solved, free) if eqn.params["left_side"] else (*batch, free, solved)
    triangle: DimMap = (*batch, factors.new_whole(matrix[-2]), factors.new_whole(matrix[-1]))
    work = float(math.prod(sides) * matrix[-1])
    return factors.rule([triangle, dims], [dims], linear=linear_sets(eqn, {1}), flops=work_per_point(work, factors))


def _transformed_rank(eqn: Equation) -> int:
    return len(eqn.params["fft_lengths"])


def _transformed(eqn: Equation) -> Rule:
    return dataclasses.replace(_batched(_transformed_rank, {0})(eqn), emit=_emit_transform)


def _emit_transform(local: Local, eqn: Equation, operands: Sequence[Any]) -> Sequence[Any]:
    """XLA:CPU transforms arrays in row-major layout only, and lets a collective beside a transform choose another."""
    return [_row_major(x) for x in bind(eqn, [_row_major(x) for x in operands])]


def _row_major(x: Any) -> Any:
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


_MATRIX = """cholesky cholesky_update eig eigh geqp3 geqrf hessenberg householder_product lu ormqr qr schur svd
    symmetric_product tridiagonal"""

RULES: dict[str, RuleBuilder] = {
    **{name: _batched(lambda eqn: 2) for name in _MATRIX.split()},
    "fft": _transformed,
    "lu_pivots_to_permutation": _batched(lambda eqn: 1),
    "triangular_solve": _triangular_solve,
    "tridiagonal_solve": _batched(lambda eqn: 1, {3}),
}
