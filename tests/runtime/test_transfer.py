"""Copies between meshes: the right tiles on the right devices, issued without reading an array on the host."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from autopar.cost_model.reshard import shardings, tile_copies
from autopar.ir.mesh import Mesh
from autopar.ir.sharding import Sharding
from autopar.passes.emit import partition_spec
from autopar.runtime.transfer import TileTransfer, send

SHAPE = (8, 4)
SOURCES = [Mesh((0, 1, 2, 3), (2, 2), ("x", "y")), Mesh((0, 1, 2, 3), (4,), ("x",)), Mesh((0,), (1,), ("x",))]
TARGETS = [Mesh((4, 5, 6, 7), (2, 2), ("x", "y")), Mesh((4, 5), (2,), ("x",)), Mesh((7,), (1,), ("x",))]


def _on(mesh: Mesh, sharding: Sharding) -> NamedSharding:
    devices = np.array([jax.devices()[d] for d in mesh.devices], dtype=object).reshape(mesh.shape)
    return NamedSharding(jax.sharding.Mesh(devices, mesh.axes), partition_spec(sharding))


def _transfer(source: Mesh, sent: Sharding, target: Mesh, received: Sharding) -> TileTransfer:
    tiles = tile_copies(SHAPE, sent, source, received, target)
    return TileTransfer(tiles, SHAPE, np.dtype(np.float32), _on(source, sent), _on(target, received))


def _pairs(source: Mesh, target: Mesh) -> list[tuple[Sharding, Sharding]]:
    """Shardings on both meshes."""

    def full(mesh: Mesh) -> list[Sharding]:
        return [s for s in shardings(len(SHAPE), mesh) if not s.partial and s.divides(SHAPE, mesh)]

    return list(itertools.product(full(source), full(target)))


@pytest.mark.parametrize("source", SOURCES, ids=lambda mesh: f"from{mesh.shape}")
@pytest.mark.parametrize("target", TARGETS, ids=lambda mesh: f"to{mesh.shape}")
def test_every_pair_of_shardings(source: Mesh, target: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = np.arange(32, dtype=np.float32).reshape(SHAPE)
    pairs = _pairs(source, target)
    assert pairs
    for sent, received in pairs:
        array = jax.device_put(whole, _on(source, sent))
        transfer = _transfer(source, sent, target, received)
        with monkeypatch.context() as patch:
            # An array that is read on the host is read through its value.
            patch.setattr(type(array), "_value", property(lambda self: pytest.fail("read on the host")))
            moved = send(transfer, array)
        assert moved is not None and moved.sharding == transfer.target
        np.testing.assert_array_equal(np.asarray(moved), whole)
        for shard in moved.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), whole[shard.index])


def test_the_copy_does_not_share_memory_with_its_source() -> None:
    source, target = SOURCES[1], Mesh((4, 5, 6, 7), (4,), ("x",))
    cut = Sharding((("x",), ()))
    array = jax.device_put(np.ones(SHAPE, np.float32), _on(source, cut))
    moved = send(_transfer(source, cut, target, cut), array)
    assert moved is not None
    here = {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}
    there = {shard.data.unsafe_buffer_pointer() for shard in moved.addressable_shards}
    assert not here & there
