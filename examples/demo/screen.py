"""What one sees while the demo trains."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text


class _Speed(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:>7,.0f} samples/s" if speed else "", style="cyan")


class Screen:
    """A bar for each training process, with its speed and loss, and lines of news above."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._progress = Progress(
            TextColumn("[bold]{task.description:>9}"),
            BarColumn(bar_width=28),
            TextColumn("epoch {task.fields[epoch]:>2}"),
            _Speed(),
            TextColumn("loss {task.fields[loss]}"),
            TimeElapsedColumn(),
            console=console,
            speed_estimate_period=3.0,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Screen:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def add(self, name: str, samples: int) -> None:
        """A bar for a process that will train on `samples`."""
        self._tasks[name] = self._progress.add_task(name, total=samples, epoch=1, loss="")

    def update(self, name: str, samples: int, epoch: int, loss: float) -> None:
        """Moves a bar."""
        self._progress.update(self._tasks[name], completed=samples, epoch=epoch, loss=f"{loss:.4f}")

    def say(self, text: str) -> None:
        """A line above the bars."""
        self._progress.console.print(text, highlight=False)
