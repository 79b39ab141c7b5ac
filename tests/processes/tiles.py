"""Tiles of arrays from mesh to mesh, both over two processes of two devices each: `tiles.py`."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from autopar.cost_model.reshard import shardings, tile_copies
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
        channel = job.channel()
        channel.next_step()
        tiles = tile_copies(shape, sent, source, received, target)
        transfer = TileTransfer(tiles, shape, np.dtype(dtype), on(source, sent), on(target, received))
        crossed(on(source, sent), transfer, Message(job, channel, 0))
        counts[kind] += sum(map(len, transfer.route.pulls.values()))
assert counts[0] == counts[1] < counts[2], counts
print("all crossed")
