"""Progress bars on the terminal, for what takes longer than people wait without a word."""

from __future__ import annotations

import sys
import types

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class ProgramBar:
    """A bar on the error stream that is told `(done, of how many)`; gone when it ends. Silent unless `shown`."""

    def __init__(self, text: str, shown: bool) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True, disable=not shown)
        self._shown = shown
        self._task = self._progress.add_task(text, total=None)

    def __enter__(self) -> ProgramBar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        self._progress.stop()

    def __call__(self, done: int, of: int) -> None:
        self._progress.update(self._task, completed=done, total=of)

    def say(self, text: str) -> None:
        """A line on the error stream that stays, above the bar if that is shown."""
        if self._shown:
            self._progress.console.print(text, markup=False, highlight=False)
        else:
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()
