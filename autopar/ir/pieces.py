"""`Pieces`: a state leaf that lies on several pipeline stages."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from autopar.ir.graph import LeafCut


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False)
class Pieces:
    """One leaf of the state, such as the stacked weights of a loop over layers, cut along an axis between stages.

    A pytree node, so that `jax.tree.map` meets its pieces; `numpy.asarray` and `autopar.gather` give the whole.
    """

    pieces: tuple[Any, ...]  # arrays, in order, each on the mesh of its stage
    cut: LeafCut

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole."""
        first = self.pieces[0].shape
        return (*first[: self.cut.axis], self.cut.bounds[-1], *first[self.cut.axis + 1 :])

    @property
    def dtype(self) -> Any:
        return self.pieces[0].dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        whole = np.concatenate([np.asarray(x) for x in self.pieces], self.cut.axis)
        return whole if dtype is None else whole.astype(dtype)

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], LeafCut]:
        keys = (jax.tree_util.SequenceKey(k) for k in range(len(self.pieces)))
        return tuple(zip(keys, self.pieces, strict=True)), self.cut

    @classmethod
    def tree_unflatten(cls, cut: LeafCut, pieces: Any) -> Pieces:
        return cls(tuple(pieces), cut)
