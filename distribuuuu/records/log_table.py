"""Tables of a log: columns that fit into a line, and numbers in few characters."""

from collections.abc import Mapping, Sequence
from logging import Logger

# Rows of a table per header.
_ROWS_PER_HEADER = 20
# Width up to which columns are two spaces apart; with the date of train.log, a line then has at most 80 characters.
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
    """Table of the steps of a run with columns of fixed width, and a header at the start and every 20 rows."""

    def __init__(self, log: Logger, num_epochs: int, num_steps: int, metric_labels: Sequence[str]):
        totals = {"epoch": num_epochs, "step": num_steps}
        self._widths = {name: max(len(name), 2 * len(str(total)) + 1) for name, total in totals.items()}
        self._widths |= {"loss": 6, **{label: max(5, len(label)) for label in metric_labels}}
        self._widths |= {"lr": 6, "img/s": 5, "data": 4, "eta": 6}
        self._logger = log
        self.start()

    def start(self) -> None:
        """Log a header before the next row."""
        self._num_rows = 0

    def add(self, cells: dict[str, str]) -> None:
        """Log a row; columns without a cell show '-'."""
        if self._num_rows % _ROWS_PER_HEADER == 0:
            self._log({name: name for name in self._widths})
        self._num_rows += 1
        self._log(cells)

    def _log(self, cells: dict[str, str]) -> None:
        gap = "  " if sum(self._widths.values()) + 2 * len(self._widths) <= _MAX_WIDTH else " "
        self._logger.info("%s", gap.join(f"{cells.get(name, '-'):>{width}}" for name, width in self._widths.items()))
