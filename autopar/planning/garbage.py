"""Long work of Python without its search for cycles of garbage."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Tracing and planning make millions of objects and hardly a cycle: the search for cycles took a quarter of it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if not gc.get_freeze_count():
                # All that is left becomes old at once: else the next search would go through all that was made here.
                gc.freeze()
                gc.unfreeze()
            gc.enable()
