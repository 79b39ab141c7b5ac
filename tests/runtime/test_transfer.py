"""Copies between meshes: the right tiles on the right devices, issued without reading an array on the host."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from autopar.cost_model.mesh_transfer import tile_copies
from autopar.cost_model.reshard import shardings
from autopar.ir.mesh import Mesh
from autopar.ir.sharding import Sharding
from autopar.passes.emit import partition_spec
from autopar.runtime.transfer import Sending, TileTransfer, send

SHAPE = (8, 4)
SOURCES = [Mesh((0, 1, 2, 3), (2, 2), ("x", "y")), Mesh((0, 1, 2, 3), (4,), ("x",)), Mesh((0,), (1,), ("x",))]
# The last has devices of the sources, too.
TARGETS = [
    Mesh((4, 5, 6, 7), (2, 2), ("x", "y")), Mesh((4, 5), (2,), ("x",)), Mesh((7,), (1,), ("x",)),
    Mesh((2, 3, 4, 5), (4,), ("x",)),
]  # fmt: skip


def _on(mesh: Mesh, sharding: Sharding) -> NamedSharding:
    devices = np.array([jax.devices()[d] for d in mesh.devices], dtype=object).reshape(mesh.shape)
    return NamedSharding(jax.sharding.Mesh(devices, mesh.axes), partition_spec(sharding))


def _transfer(
    source: Mesh, sent: Sharding, target: Mesh, received: Sharding, like: np.ndarray[Any, Any] | None = None
) -> TileTransfer:
    shape, dtype = (SHAPE, np.dtype(np.float32)) if like is None else (like.shape, like.dtype)
    tiles = tile_copies(shape, sent, source, received, target)
    return TileTransfer(tiles, shape, dtype, _on(source, sent), _on(target, received))


def _buffers(array: jax.Array) -> set[int]:
    return {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}


def _pairs(source: Mesh, target: Mesh) -> list[tuple[Sharding, Sharding]]:
    """Shardings on both meshes."""

    def full(mesh: Mesh) -> list[Sharding]:
        return [s for s in shardings(len(SHAPE), mesh) if not s.partial and s.divides(SHAPE, mesh)]

    return list(itertools.product(full(source), full(target)))


@pytest.mark.parametrize("source", SOURCES, ids=lambda mesh: f"from{mesh.shape}")
@pytest.mark.parametrize("target", TARGETS, ids=lambda mesh: f"to{mesh.devices}")
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
            moved = send([Sending(transfer, array)])[0]
        assert moved is not None and moved.sharding.is_equivalent_to(transfer.target, moved.ndim)
        np.testing.assert_array_equal(np.asarray(moved), whole)
        for shard in moved.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), whole[shard.index])
        assert not _buffers(array) & _buffers(moved)


def test_the_copy_does_not_share_memory_with_its_source() -> None:
    source, target = SOURCES[1], Mesh((4, 5, 6, 7), (4,), ("x",))
    cut = Sharding((("x",), ()))
    array = jax.device_put(np.ones(SHAPE, np.float32), _on(source, cut))
    moved = send([Sending(_transfer(source, cut, target, cut), array)])[0]
    assert moved is not None
    assert not _buffers(array) & _buffers(moved)
    both = [Sending(_transfer(source, cut, source, cut), array, may) for may in (False, True)]
    apart, alias = send(both)
    assert apart is not None and not _buffers(array) & _buffers(apart)
    assert alias is not None and _buffers(array) == _buffers(alias)  # nor is a copy made where none is needed


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16])
def test_floats_of_16_bits_arrive_bit_by_bit(dtype: Any) -> None:
    """All of them: those that are not numbers, too."""
    source, target = SOURCES[1], TARGETS[3]
    rows, columns = Sharding((("x",), ())), Sharding(((), ("x",)))
    whole = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256).view(dtype)
    transfer = _transfer(source, rows, target, columns, whole)
    moved = send([Sending(transfer, jax.device_put(whole, transfer.source))])[0]
    assert transfer.is_cut and transfer.is_joined and moved is not None
    np.testing.assert_array_equal(np.asarray(moved).view(np.uint16), whole.view(np.uint16))


def test_devices_send_the_parts_that_others_take_alone() -> None:
    """Two devices have the whole, and two others take a half each: nobody cuts the half that it does not send."""
    source, target = Mesh((0, 1), (2,), ("x",)), TARGETS[1]
    whole, cut = Sharding.replicated(2), Sharding((("x",), ()))
    cutters = _transfer(source, whole, target, cut).cutters
    assert [[tile.cut for tile in tiles] for tiles, _ in cutters.values()] == [[0], [1]]
