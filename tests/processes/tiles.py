"""Tiles of arrays from mesh to mesh, both over two processes of two devices each: `tiles.py`."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from autopar.cost_model.mesh_transfer import tile_copies
from autopar.cost_model.reshard import shardings
from autopar.ir.mesh import Mesh
from autopar.ir.sharding import Sharding
from autopar.passes.emit import partition_spec
from autopar.runtime.mail import Message
from autopar.runtime.processes import this_job
from autopar.runtime.transfer import Sending, TileTransfer, send

MESHES = [
    (Mesh((0, 1), (2,), ("x",)), Mesh((2, 3), (2,), ("x",))),
    (Mesh((0, 1, 2, 3), (4,), ("x",)), Mesh((2, 3), (2,), ("x",))),
    (Mesh((0, 1), (2,), ("x",)), Mesh((0, 1, 2, 3), (2, 2), ("x", "y"))),
    (Mesh((1, 2), (2,), ("x",)), Mesh((3, 2, 1, 0), (4,), ("x",))),
    (Mesh((0, 1, 2, 3), (2, 2), ("x", "y")), Mesh((0, 1, 2, 3), (2, 2), ("x", "y"))),  # both take all from one another
]
KINDS = [((8, 4), jnp.float32), ((8, 4), jnp.bfloat16), ((512, 256), jnp.float32)]  # whose parts are small, or not
job = this_job()
assert job is not None
job.connect()


def on(mesh: Mesh, sharding: Sharding) -> NamedSharding:
    """The sharding on the devices of this job."""
    devices = np.array([jax.devices()[d] for d in mesh.devices], dtype=object).reshape(mesh.shape)
    return NamedSharding(jax.sharding.Mesh(devices, mesh.axes), partition_spec(sharding))


def crossed(source: NamedSharding, transfer: TileTransfer, message: Message) -> None:
    """One array, compared tile by tile."""
    shape = transfer.shape
    whole = (np.arange(np.prod(shape)) % 251).astype(transfer.dtype).reshape(shape)
    array: Any = None
    if source.addressable_devices:
        array = jax.make_array_from_callback(shape, source, lambda index: whole[index])
    (found,) = send([Sending(transfer, array, is_fragile=True)], message)
    if array is not None:
        array.delete()  # what has been sent needs it no more
    for shard in () if found is None else found.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), whole[shard.index], err_msg=str(transfer))


counts = [0] * len(KINDS)  # of tiles and parts that came from the other process
for (source, target), (kind, (shape, dtype)) in itertools.product(MESHES, enumerate(KINDS)):
    there = [[s for s in shardings(2, mesh) if not s.partial] for mesh in (source, target)]
    for sent, received in itertools.product(*there):
        channel = job.channel("a test", ())
        channel.next_step()
        tiles = tile_copies(shape, sent, source, received, target)
        transfer = TileTransfer(tiles, shape, np.dtype(dtype), on(source, sent), on(target, received))
        crossed(on(source, sent), transfer, Message(job, channel, 0))
        counts[kind] += sum(map(len, transfer.route.pulls.values()))
assert counts[0] == counts[1] < counts[2], counts

# Several arrays as one message: some are cut and joined, some whole, one is empty; half of them are given away at once.
source, target = MESHES[0]
values = [
    *(np.arange(32, dtype=np.float32).reshape(8, 4) + k for k in range(3)), np.arange(4, dtype=np.int32),
    np.zeros((0, 4), np.float32), np.arange(2, dtype=np.uint32),
]  # fmt: skip
channel = job.channel("a test", ())
for step in range(3):
    channel.next_step()
    sendings = []
    for number, value in enumerate(values):
        is_matrix = value.shape == (8, 4)
        whole = Sharding.replicated(value.ndim)
        sent, received = (Sharding((("x",), ())), Sharding(((), ("x",)))) if is_matrix else (whole, whole)
        tiles = tile_copies(value.shape, sent, source, received, target)
        transfer = TileTransfer(tiles, value.shape, value.dtype, on(source, sent), on(target, received))
        array = None
        if transfer.source.addressable_devices:
            array = jax.make_array_from_callback(value.shape, transfer.source, (step + value).__getitem__)
        sendings.append(Sending(transfer, array, is_fragile=number % 2 == 0))
    found = send(sendings, Message(job, channel, 0))
    for sending in sendings:
        if sending.is_fragile and sending.array is not None:
            sending.array.delete()  # as a program does that overwrites it
    for value, arrived in zip(values, found, strict=True):
        for shard in () if arrived is None else arrived.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), step + value[shard.index])
print("all crossed")
