"""Tables of a log: columns that fit into a line, and numbers in few characters."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from logging import Logger

# Rows of a table per header.
_ROWS_PER_HEADER = 20
# Maximum width of the table of steps; with the date of train.log, a line has at most 80 characters.
_MAX_WIDTH = 65


def format_duration(seconds: float) -> str:
    """Return the two largest units of a duration in at most 6 characters, e.g. '45s', '3m24s', '5h10m' or '12d03h'."""
    minutes, rest = divmod(round(max(0, min(seconds, 1e12))), 60)  # a number of an untrusted file may be infinite
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days >= 100:
        return f"{days}d"
    if days:
        return f"{days}d{hours:02d}h"
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def format_decimal(value: float, width: int, decimals: int = 4) -> str:
    """Return a number with `decimals` decimals, or with as many as fit into `width` characters."""
    texts = (f"{value:.{num}f}" for num in range(decimals, -1, -1))
    return next((text for text in texts if len(text) <= width), f"{value:.0e}")


def format_result(result: Mapping[str, float], labels: Mapping[str, str], decimals: int) -> str:
    """Return the metrics of an evaluation by display name, further means, and the loss: 'top1 71.32 loss 0.8123'."""
    metrics = [f"{label} {result[name]:.{decimals}f}" for name, label in labels.items()]
    others = [name for name in result if name not in ("count", "loss", *labels)]
    return " ".join([*metrics, *(f"{name} {format_decimal(result[name], 6)}" for name in (*others, "loss"))])


def format_lr(lr: float) -> str:
    """Return a learning rate with two digits in at most 6 characters, e.g. '0.023' or '1.2e-4'."""
    return f"{lr:.2g}" if lr == 0 or lr >= 1e-3 else f"{lr:.1e}".replace("e-0", "e-")


def format_speed(images_per_s: float) -> str:
    """Return images per second in at most 5 characters, e.g. '3.4', '12345', '123k' or '12M'."""
    if images_per_s < 9.95:
        return f"{images_per_s:.1f}"
    if images_per_s < 99999.5:
        return f"{images_per_s:.0f}"
    return f"{images_per_s / 1e3:.0f}k" if images_per_s < 9.9995e6 else f"{images_per_s / 1e6:.0f}M"


class LogTable:
    """Table with columns of fixed width, and a header at the start and every 20 rows.

    Columns in `optional` that do not fit into `max_width()` characters are left out, the last ones first.
    """

    def __init__(
        self, log: Logger, widths: Mapping[str, int], max_width: Callable[[], int], optional: Sequence[str] = ()
    ):
        self._logger, self._widths, self._max_width, self._optional = log, widths, max_width, optional
        self.start()

    def start(self) -> None:
        """Log a header before the next row."""
        self._num_rows, self._columns = 0, tuple(self._widths)

    def add(self, cells: dict[str, str]) -> None:
        """Log a row; columns without a cell show '-'."""
        shown, waiting, most = dict(self._widths), list(self._optional), self._max_width()
        while waiting and sum(shown.values()) + len(shown) - 1 > most:
            del shown[waiting.pop()]
        if self._num_rows % _ROWS_PER_HEADER == 0 or self._columns != tuple(shown):
            self._num_rows, self._columns = 0, tuple(shown)
            self._log({name: name for name in shown}, shown, most)
        self._num_rows += 1
        self._log(cells, shown, most)

    def _log(self, cells: dict[str, str], widths: Mapping[str, int], most: int) -> None:
        gap = "  " if sum(widths.values()) + 2 * len(widths) <= most else " "
        self._logger.info("%s", gap.join(f"{cells.get(name, '-'):>{width}}" for name, width in widths.items()))


def _room_in_terminal() -> int:
    """Return how many characters fit behind the time of a line; in a notebook, of 80 columns."""
    try:
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
    except OSError:
        columns = 0
    return (columns or 80) - len("00:00:00 ") - 1  # a full line wraps in some terminals


def build_tables(
    steps_log: Logger, epochs_log: Logger, num_epochs: int, num_steps: int, metric_labels: Sequence[str]
) -> tuple[LogTable, LogTable]:
    """Return the table of steps, and that of epochs, which fits into the terminal; each has its logger."""
    totals = {"epoch": num_epochs, "step": num_steps}
    widths = {name: max(len(name), 2 * len(str(total)) + 1) for name, total in totals.items()}
    widths |= {"loss": 6, **{label: max(5, len(label)) for label in metric_labels}, "lr": 6, "img/s": 5, "data": 4}
    widths["eta"] = 6
    of_epochs = {name: width for name, width in widths.items() if name != "step"}
    optional = ("eta", *metric_labels, "lr", "img/s", "data")
    steps = LogTable(steps_log, widths, lambda: _MAX_WIDTH)
    return steps, LogTable(epochs_log, of_epochs, _room_in_terminal, optional)
