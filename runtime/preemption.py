"""Requests to end, for which a checkpoint is written before.

Schedulers send them (SIGTERM) before they take a machine away; `autopar run --elastic` makes a file when it has more
devices, so that a job that never saves is not ended by it.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import signal
import threading
import time
from typing import Any

from autopar.errors import PeerError, PlanMismatchError
from autopar.runtime.processes import Processes, this_job

EXIT_CODE = os.EX_TEMPFAIL  # 75: "try again later", by which a launcher knows that the job is to be queued again
ROOM = "AUTOPAR_ROOM"  # the variable that names a file, which `autopar run --elastic` makes when it has more devices
_ROOM_FILE = os.environ.pop(ROOM, None)  # it is meant for this process, and not for programs that the script starts
_ENDING = "ending"
_LOOK = 1.0  # seconds between looks for a request to another process
_TOGETHER = 2.0  # seconds within which requests are one: a launcher hands on what goes to the whole group
_HEARD = (
    b"autopar: asked to end (SIGTERM): the next autopar.save writes a checkpoint and ends the program; a second "
    b"request ends it at once\n"
)


class Preemption:
    """Whether this process, or another of its job, was asked to end; after which call all of them do."""

    def __init__(self) -> None:
        """From now on SIGTERM is heard here, unless the program hears it itself."""
        self.has_come = False
        self._asked = math.inf  # when it was
        self._folder: str | None = None
        self._calls = 0
        self._last = math.inf  # the call after which all processes of a job end
        self._counting = threading.Lock()
        self._wakes, self._is_over = threading.Event(), False
        job = this_job()
        if _is_main() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._hear)
        if job is not None:
            listener = threading.Thread(target=self._listen, args=(job,), name="autopar: requests to end", daemon=True)
            listener.start()
            atexit.register(self._stop, listener)

    def can_end(self, folder: str) -> bool:
        """Whether a call may end the program: of the folder that comes first, in the main thread."""
        self._folder = self._folder or folder
        return folder == self._folder and _is_main()

    def comes_now(self, folder: str) -> bool:
        """Whether to end after this call. All processes of a job make the same calls, if not at the same time.

        Calls count that can end the program.
        """
        if not self.can_end(folder):
            return False
        with self._counting:
            self._calls += 1
            return self._calls >= self._last if this_job() is not None else math.isfinite(self._asked) or _has_room()

    def _hear(self, number: int, _: Any) -> None:
        now, job = time.monotonic(), this_job()
        if now > self._asked + _TOGETHER:  # once more: whoever sends it does not want to wait
            code = 128 + number
            if job is not None:
                job.fail(SystemExit("asked to end twice"), code)
            os._exit(code)
        if math.isinf(self._asked):
            os.write(2, _HEARD)
        self._asked = min(now, self._asked)
        self._wakes.set()

    def _listen(self, job: Processes) -> None:
        """Until one is asked. Then no process makes another call until all have said how many they have made.

        This thread says it, since another process may wait in a step for one that has not begun it.
        """
        while not (self._wakes.wait(_LOOK) or _has_room() or job.anyone_said(_ENDING)):
            pass
        if self._is_over:
            return
        with self._counting, contextlib.suppress(PlanMismatchError, PeerError):  # of another that has ended
            self._last = 1 + max(map(int, job.all_say(_ENDING, str(self._calls), "to save before the job ends")))

    def _stop(self, listener: threading.Thread) -> None:
        """Before the job is left."""
        if signal.getsignal(signal.SIGTERM) == self._hear:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._is_over = True
        self._wakes.set()
        listener.join()


def _has_room() -> bool:
    """Whether the job is to end since there are more devices for its next start."""
    return _ROOM_FILE is not None and os.path.exists(_ROOM_FILE)


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()
