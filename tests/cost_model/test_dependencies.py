"""What needs what among kernels that grow, against a search of the whole graph."""

from __future__ import annotations

import random

import pytest

from autopar.cost_model.dependencies import Dependencies


def reached(needs: list[set[int]], start: int) -> set[int]:
    """What a node needs, directly or not."""
    found: set[int] = set()
    todo = [start]
    while todo:
        for other in needs[todo.pop()] - found:
            found.add(other)
            todo.append(other)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_a_node_can_come_to_need_what_does_not_need_it(seed: int) -> None:
    draw = random.Random(seed)
    dependencies, needs = Dependencies(), []
    refused = extended = 0
    for number in range(60):
        mine = set(draw.sample(range(number), min(number, draw.randrange(3))))
        assert dependencies.add(mine) == number
        needs.append(mine)
        node, others = draw.randrange(number + 1), draw.sample(range(number + 1), min(number + 1, 2))
        allowed = all(node not in reached(needs, other) for other in others if other != node)
        assert dependencies.can_extend(node, others) == allowed
        if allowed:
            dependencies.extend(node, others)
            needs[node] |= {*others} - {node}
            extended += 1
        else:
            refused += 1
    assert all(node not in reached(needs, node) for node in range(60))
    assert refused > 3 and extended > 3
