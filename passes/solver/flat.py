"""From a network to the arrays that compiled loops work on (`kernels.Flat`)."""

from __future__ import annotations

import numpy as np

from autopar.passes.solver.kernels import Flat
from autopar.passes.solver.network import Network
from autopar.passes.solver.problem import Array, Integers


def flatten(network: Network) -> Flat:
    """The arrays of a network."""
    nodes = sorted(network.unary)
    index = {node: i for i, node in enumerate(nodes)}
    sizes = np.array([network.unary[node].size for node in nodes], dtype=np.int64)
    neighbours = [sorted(network.adjacent[node]) for node in nodes]
    links = _sums([len(others) for others in neighbours])
    matrices = [network.adjacent[node][v] for node, others in zip(nodes, neighbours, strict=True) for v in others]
    owner = np.repeat(np.arange(len(nodes)), np.diff(links))
    other = np.array([index[v] for others in neighbours for v in others], dtype=np.int64)
    # links ordered by (other, owner) are the links ordered by (owner, other) from the other side
    back = np.empty(other.size, dtype=np.int64)
    back[np.lexsort((owner, other))] = np.arange(other.size)
    spans = [network.usages[node] for node in nodes]
    flat = [span for node_spans in spans for span in node_spans]
    return Flat(
        nodes=np.array(nodes, dtype=np.int64),
        start=_sums(sizes),
        unary=_joined([network.unary[node] for node in nodes]),
        links=links,
        other=other,
        back=back,
        pair_at=_sums([matrix.size for matrix in matrices]),
        message_at=_sums(sizes[owner]),
        pair=_joined([matrix.ravel() for matrix in matrices]),
        spans=_sums([len(node_spans) for node_spans in spans]),
        span_start=np.array([start for start, _, _ in flat], dtype=np.int64),
        span_end=np.array([end for _, end, _ in flat], dtype=np.int64),
        span_at=_sums([amount.size for _, _, amount in flat]),
        amount=_joined([amount for _, _, amount in flat]),
        slack=network.slack,
    )


def _sums(sizes: Integers | list[int]) -> Integers:
    return np.concatenate(([0], np.cumsum(np.asarray(sizes, dtype=np.int64)))).astype(np.int64)


def _joined(parts: list[Array]) -> Array:
    return np.concatenate(parts) if parts else np.zeros(0)
