"""Who writes into a folder of checkpoints: one program at a time.

Its first process leaves its name there. A second program on the same host is refused while the first one runs. On
another host nobody can know that: there the name of the last one that began holds, and the one before is refused when
it writes again, so that what two runs write never mixes. A program that has ended leaves nothing to clean up.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import platform
import uuid
from typing import Any

from autopar.errors import CheckpointError

_FILE = "writer.json"
_ME = uuid.uuid4().hex  # of this program
_claimed: set[str] = set()  # by it


@dataclasses.dataclass(frozen=True)
class Writer:
    """A program that writes checkpoints."""

    identity: str
    host: str
    process_id: int
    started: str  # when, in the system's own count; process ids are used again

    def __str__(self) -> str:
        return f"process id {self.process_id} on {self.host}"

    def runs_here(self) -> bool:
        """Whether it is known to run, on this host."""
        return self.host == platform.node() and bool(self.started) and _started(self.process_id) == self.started


def _started(process_id: int) -> str:
    """Clock ticks after the system's start, and which start that was; "" if there is no such process (or no /proc)."""
    try:
        fields = pathlib.Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else f"{fields[19]} {boot}"  # the 22nd of all; ended, but not yet waited for


def _last(folder: Any) -> Writer | None:
    """The last that began to write there."""
    try:
        return Writer(**json.loads((folder / _FILE).read_text()))
    except (OSError, ValueError, TypeError):  # none yet, or from another version
        return None


def claim(folder: Any) -> str:
    """This program writes there, for the first time or again; "".

    Raises:
      CheckpointError: another one that runs on this host does so, or has begun to since this one has.
    """
    last = _last(folder)
    if last is not None and last.identity == _ME:
        return ""
    if last is not None and str(folder) in _claimed:
        raise CheckpointError(
            f"save: since this program began to write checkpoints into {folder}, {last} has begun to, and what two "
            "runs write must not mix. If this one is to go on, start it with another folder."
        )
    if last is not None and last.runs_here():
        raise CheckpointError(
            f"save: {last} writes its checkpoints into {folder}, and what two runs write must not mix. End that one, "
            "or save into another folder."
        )
    me = Writer(_ME, platform.node(), os.getpid(), _started(os.getpid()))
    (folder / _FILE).write_text(json.dumps(dataclasses.asdict(me)))
    _claimed.add(str(folder))
    return ""
