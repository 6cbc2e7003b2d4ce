"""Shows on standard error how far a long task has come.

Knows the one shape in which every part reports, ``(phase, done, total)``. Does not know what the phases are.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

MEGABYTE = 1_000_000


def amount(done: int, total: int) -> str:
    """``3/12`` for things, ``1.2/97.6 MB`` where the numbers can only be bytes."""
    if total >= MEGABYTE:
        return f"{done / MEGABYTE:.1f}/{total / MEGABYTE:.1f} MB"
    return f"{done}/{total}" if total else str(done)


class ProgressBars:
    """One bar a phase on a terminal; elsewhere one line when a phase begins and one when it is done.

    A context manager; inside, call it with a phase, how much of it is done and how much there is (0: unknown).
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[amount]}"),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def __call__(self, phase: str, done: int, total: int) -> None:
        """Takes one report."""
        begins = phase not in self._tasks
        if begins:
            self._tasks[phase] = self._bars.add_task(phase, amount="")
        ended = self._bars.tasks[self._tasks[phase]].finished
        self._bars.update(self._tasks[phase], completed=done, total=total or None, amount=amount(done, total))
        ends = total > 0 and done >= total and not ended
        if not self._console.is_terminal and (begins or ends):
            self._console.print(f"{phase} {amount(done, total)}", highlight=False, markup=False)
