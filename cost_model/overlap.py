"""How much shorter a program is since collectives run beside kernels.

Kernels run one after the other on one stream, collectives one after the other on another one, both in the order in
which XLA issues them (`order.py`). The end of a collective waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from autopar.cost_model.order import ProgramKernel


def hidden_seconds(order: Iterable[ProgramKernel], slowdown: float) -> float:
    """Seconds by which kernels in this order are done sooner than one after the other.

    Args:
      order: kernels, and collectives as their starts and ends, or whole where nothing runs beside them.
      slowdown: by how much slower kernels are, as a share of their speed, while a collective runs beside them.
    """
    now = until = one_by_one = 0.0  # seconds: of the kernels' stream; when the last collective is done
    under_way: deque[float] = deque()  # when those are done whose ends are still to come
    for kernel in order:
        one_by_one += kernel.cost if kernel.starts else 0.0
        if kernel.collective is None:
            beside = min(kernel.cost, max(0.0, until - now) * (1 - slowdown))  # of its work
            now += kernel.cost - beside + beside / (1 - slowdown)
        elif kernel.starts:
            until = max(now, until) + kernel.cost
            under_way.append(until)
        if kernel.collective is not None and kernel.ends:
            now = max(now, under_way.popleft())
    return max(0.0, one_by_one - max(now, until))
