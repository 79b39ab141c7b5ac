"""The groups of devices that stages may have, and their logical meshes."""

from __future__ import annotations

from collections import Counter

import pytest

from autopar.ir.mesh import Cluster, DeviceKind, Host, Mesh
from autopar.passes.stage_oracle import Span, StageCost
from autopar.passes.submeshes import candidate_shapes, mesh_at
from tests.passes.oracles import KIND, LINK, cluster, search


@pytest.mark.parametrize(
    ("start", "size", "shapes"),
    [
        (0, 1, [(1,)]),
        (3, 2, [(2,)]),
        (1, 4, [(4,), (2, 2)]),
        (2, 3, [(3,)]),  # divides 6
        (0, 5, []),  # neither divides 6 nor is a power of two
        (0, 6, [(6,), (2, 3), (3, 2)]),
        (4, 4, []),  # over the border of a host
        (6, 2, [(2,)]),
        (0, 8, [(8,), (2, 4), (4, 2)]),  # hosts 0 and 1
        (6, 8, [(8,), (2, 4), (4, 2)]),  # hosts 1 and 2
        (6, 3, []),  # a host and a half
        (8, 4, [(4,), (2, 2)]),
        (0, 14, [(14,), (2, 7), (7, 2)]),
        (8, 7, []),
        (14, 1, []),
        (0, 0, []),
    ],
)
def test_candidate_shapes(start: int, size: int, shapes: list[tuple[int, ...]]) -> None:
    """Hosts of 6, 2 and 6 devices: 0-5, 6-7, 8-13."""
    assert list(candidate_shapes(cluster(6, 2, 6), start, size)) == shapes
    meshes = [mesh_at(start, shape) for shape in shapes]
    for mesh in meshes:
        assert mesh.devices == tuple(range(start, start + size))
        assert mesh.axes == ("x", "y")[: len(mesh.shape)]
    for mesh in meshes[1:]:
        assert mesh.group(("y",)) == tuple(range(start, start + mesh.shape[1]))


def test_shapes_can_be_restricted() -> None:
    def one_dimensional(where: Cluster, start: int, size: int) -> tuple[tuple[int, ...], ...]:
        return candidate_shapes(where, start, size)[:1]

    def cost(span: Span, mesh: Mesh, held: int) -> StageCost:
        assert len(mesh.shape) == 1
        return StageCost(1.0, 0.0, 0)

    assert search(2, cluster(4, 4), cost, 4, "gpipe", shapes=one_dimensional) is not None


@pytest.mark.parametrize("hosts", [*(pytest.param(n, marks=pytest.mark.slow) for n in (130, 384)), 315, 1024])
def test_thousands_of_devices(hosts: int) -> None:
    """Layers of like work: stages of like numbers of hosts, each asked for once."""
    asked: Counter[tuple[Span, int, int]] = Counter()

    def cost(span: Span, mesh: Mesh, held: int) -> StageCost | None:
        asked[span, mesh.size, held] += 1
        if mesh.size > 8 * hosts // 3:  # as if it had no more examples to split
            return None
        return StageCost((span[1] - span[0]) / mesh.size, 0.0, 1.0)

    def least(span: Span, mesh: Mesh) -> StageCost:
        return StageCost((span[1] - span[0]) / mesh.size, 0.0, 0.0)

    plan = search(
        12, cluster(*(8,) * hosts), cost, 512, "1f1b", shapes=lambda where, start, size: ((size,),) if size else (),
        least=least, alike=lambda start, size: size,
    )  # fmt: skip
    assert plan is not None
    devices = [d for stage in plan.stages for d in stage.mesh.devices]
    assert devices == list(range(8 * hosts))
    perfect = 512 * 12 / (8 * hosts)  # without a bubble
    assert plan.step_time < 1.15 * perfect
    assert max(asked.values()) == 1


def test_groups_of_mixed_hosts_begin_where_hosts_differ() -> None:
    """Units of several hosts never have hosts of both kinds, if the kinds' numbers allow it."""
    slow = Host(DeviceKind("slow", 1, 1.0, {}, 1.0, 1.0, 0.0, 0.0), 8, LINK)
    fast = Host(KIND, 8, LINK)
    mixed = Cluster("mixed", (slow,) * 96 + (fast,) * 192, LINK)
    seen: set[tuple[int, int]] = set()

    def shapes(where: Cluster, start: int, size: int) -> tuple[tuple[int, ...], ...]:
        seen.add((start, start + size))
        return ((size,),)

    search(2, mixed, lambda span, mesh, held: StageCost(1.0, 0.0, 1.0), 4, "1f1b", shapes=shapes)
    borders = {at for group in seen for at in group}
    assert borders == set(range(0, 288 * 8 + 1, 2 * 8))
    assert 96 * 8 in borders
