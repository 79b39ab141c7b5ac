"""What is brought from the host to devices is as it was, whatever its owner does with it at once."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autopar.ir.graph import BatchDim
from autopar.runtime.feeding import DataShard, Rows, place_rows
from autopar.runtime.placement import Array, place

SHAPES = [(4, 4), (4096, 4), (4096, 512)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("spec", [P("x"), P(), P(None, "x")], ids=str)
@pytest.mark.parametrize("count", [1, 4])
def test_a_buffer_that_is_filled_anew(count: int, spec: P, shape: tuple[int, int]) -> None:
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:count]), ("x",)), spec)
    array = Array(shape, np.dtype(np.float32), sharding)
    feeds = {0: (0, BatchDim(0, 1, shape[0], 1), 0, array)}
    rows = Rows(DataShard(0, 1), np.arange(shape[0]))
    for _ in range(20):  # it is a race
        buffer = np.ones(shape, np.float32)
        (placed,) = place([buffer], [sharding])
        buffer.fill(np.nan)
        fed = np.ones(shape, np.float32)
        found = place_rows({0: fed}, feeds, rows)
        fed.fill(np.nan)
        assert (np.asarray(placed) == 1).all() and (np.asarray(found[0]) == 1).all()
