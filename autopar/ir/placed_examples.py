"""`PlacedExamples`: an argument of examples that lies on the devices already."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class PlacedExamples:
    """A leaf of a batch, as one compiled step wants it; of several processes each has the part for its devices."""

    shape: tuple[int, ...]  # of the whole
    dtype: Any
    function: str  # of that step
    owner: Any  # that step
    arrays: Mapping[int, Any]  # of each stage and microbatch, by the step's register

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        raise TypeError(
            f"this leaf of {self.dtype}{list(self.shape)} was placed on the devices for {self.function}, and is in no "
            "one place any more: look at what the iterator gives before it is passed to batches()."
        )
