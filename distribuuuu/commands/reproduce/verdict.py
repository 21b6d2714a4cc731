"""The verdict on a rerun: weights by their SHA-256, conditions that differ, and the interval of the row."""

import math
import statistics
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from distribuuuu.checkpoint.weights_files import RAW, common_kind
from distribuuuu.commands.output import WIDTH
from distribuuuu.commands.stats.run_groups import Result
from distribuuuu.commands.stats.significance import mean_interval
from distribuuuu.records.read_results import list_metrics

_NAME_WIDTH = 30
# Difference of two percentages that is due to rounding.
_ROUNDING = 1e-9
# Keys of results.json, beside `environment` and `versions`, that weights depend on.
_CONDITIONS = ("hardware", "training.processes", "training.global_batch", "data.num_train", "plugins", "config_hash",
               "commit")  # fmt: skip


class Figure(NamedTuple):
    """The figure of a row: its first metric at the last epoch.

    Attributes:
        kind: the weights, see `weights_files.KINDS`: an average, if there is one.
        metric: the name in results.json.
        values: of each seed; null values are omitted.
        text: its display name, the mean and the 95 % interval of the mean, as in the result tables.
    """

    kind: str
    metric: str
    values: list[float]
    text: str


def read_figure(row: Sequence[Result]) -> Figure:
    """Return the figure by which a row is compared."""
    records = [run.record for run in row]
    kind = common_kind([record["accuracy"] for record in records])
    metric, label = next(iter(list_metrics(records[0]).items()), ("loss", "loss"))
    found = [record["accuracy"][kind]["last"].get(metric) for record in records]
    values = [value for value in found if value is not None]
    text = f"{label} {statistics.fmean(values):.2f}" if values else f"{label} unknown"
    if len(values) > 1:
        low, high = mean_interval(values)
        text += f" [{low:.2f}, {min(high, 100):.2f}]"
    return Figure(kind, metric, values, text)


def format_rows(rows: Mapping[str, Sequence[Result]]) -> str:
    """Return a table of the rows: name, number of seeds, figure, hours of a run, whether hashes are recorded."""
    lines = [f"{'row':<{_NAME_WIDTH}} {'n':>2}  {'result, last epoch':<29} {'hours':>6}  sha256"]
    for name, row in sorted(rows.items()):
        hours = statistics.fmean(run.record["training"]["hours"] for run in row)
        has_hash = "yes" if all("weights_sha256" in run.record for run in row) else "no"
        first = name
        if len(name) > _NAME_WIDTH:
            lines += textwrap.wrap(name, WIDTH, subsequent_indent="  ")
            first = ""
        lines.append(f"{first:<{_NAME_WIDTH}} {len(row):>2}  {read_figure(row).text:<29} {hours:>6.3g}  {has_hash}")
    return "\n".join(lines)


def compare_run(row: Sequence[Result], rerun: Mapping[str, Any]) -> tuple[bool, str]:
    """Return whether the results of a rerun agree with a row, and the report.

    Args:
        row: the runs of the row.
        rerun: results.json of the rerun.
    """
    figure = read_figure(row)
    original = next((run.record for run in row if run.record["seed"] == rerun["seed"]), None)
    differences = list(find_differences(original or row[0].record, rerun))
    is_equal, weights = compare_weights(original, rerun, differences)
    value = rerun["accuracy"].get(figure.kind, {}).get("last", {}).get(figure.metric)
    before = original["accuracy"][figure.kind]["last"].get(figure.metric) if original else None
    is_inside, verdict = compare_value(value, figure.values)
    if is_equal is not None:
        is_inside, verdict = is_equal, "reproduced: bitwise" if is_equal else "NOT reproduced bitwise"
    result = f"{figure.metric} {_round(value)} with seed {rerun['seed']}"
    lines = [
        ("weights", weights),
        *(("differs", difference) for difference in differences),
        ("result", f"{result}; {_round(before)} in the row" if original else result),
        ("row", f"{figure.text}, n = {len(row)}"),
        ("verdict", verdict),
    ]
    text = [textwrap.fill(f"{label:<9}{line}", WIDTH, subsequent_indent=" " * 9) for label, line in lines]
    return is_inside, "\n".join(text)


def _round(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}"


def compare_weights(
    original: Mapping[str, Any] | None, rerun: Mapping[str, Any], differences: Sequence[str]
) -> tuple[bool | None, str]:
    """Return whether the hashes of the final weights are equal, and a description.

    None instead of False: they cannot be compared, or equality is not promised.
    """
    if original is None:
        return None, "not compared: the row does not have this seed"
    expected, found = original.get("weights_sha256"), rerun.get("weights_sha256")
    if not expected or not found:
        return None, "not compared: the row has no sha256 of its weights"
    if expected == found:
        return True, f"bitwise equal, sha256 {found.get(RAW)}"
    if differences:
        return None, "not bitwise equal, which only holds under the same conditions"
    if not rerun.get("environment", {}).get("deterministic"):
        return None, "not bitwise equal, which needs CUDNN.DETERMINISTIC True"
    return False, "NOT bitwise equal, though no recorded condition differs"


def describe_possible(row: Sequence[Result], seed: int) -> str:
    """Return which verdicts a rerun of a row can have, before it is trained."""
    from distribuuuu.records.environment import find_commit  # imports torch

    original = next((run.record for run in row if run.record["seed"] == seed), None)
    commit = find_commit()
    is_same = original and original.get("weights_sha256") and original["commit"] == commit
    parts = ["bitwise equality with the recorded weights, on the same machine and versions"] if is_same else []
    if original and not is_same:
        parts.append(f"no bitwise verdict is expected: the row is of commit {_shorten(original['commit'])}, this is "
                     f"{_shorten(commit)}")  # fmt: skip
    interval = f"inside or outside the 95 % interval of {len(row)} seeds"
    parts.append(interval if len(row) > 1 else "no interval: the row has one seed, so a difference stays undecided")
    return "; ".join(parts)


def compare_value(value: float | None, values: Sequence[float]) -> tuple[bool, str]:
    """Return whether a value is inside the 95 % interval of the mean of a row, else of one more run; and the verdict.

    The latter interval, of prediction, is wider by the factor sqrt(n + 1).
    """
    if value is None or not values:
        return False, "not decided: the result is unknown"
    if len(values) == 1:
        return False, "not decided: the row has one seed, and so no interval"
    low, high = mean_interval(values)
    gap, half = abs(value - (low + high) / 2), (high - low) / 2
    if gap <= half + _ROUNDING:
        return True, "reproduced: inside the 95 % interval of the row"
    if gap <= half * math.sqrt(len(values) + 1):
        return True, "reproduced: outside the 95 % interval of the mean, inside that of a single run"
    return False, "NOT reproduced: outside the 95 % intervals of the mean and of a single run"


def find_differences(original: Mapping[str, Any], rerun: Mapping[str, Any]) -> Iterator[str]:
    """Yield the conditions of bitwise equality that differ between two runs; what one did not record is left out."""
    pairs = [(key, _look_up(original, key), _look_up(rerun, key)) for key in _CONDITIONS]
    for section in ("environment", "versions"):
        before, now = original.get(section, {}), rerun.get(section, {})
        pairs += [(f"{section}.{key}", before[key], now[key]) for key in sorted(before.keys() & now.keys())]
    for key, before, now in pairs:
        if before != now:
            yield f"{key}: {_shorten(before)} in the row, {_shorten(now)} here"
        elif key == "commit" and str(now).endswith("+changes"):
            yield f"commit: {_shorten(now)}, uncommitted changes"


def _look_up(record: Mapping[str, Any], key: str) -> Any:
    section, _, name = key.rpartition(".")
    return (record[section] if section else record).get(name)


def _shorten(value: Any) -> str:
    """Return a text, with the first digits of a hash or commit."""
    digits, sign, rest = str(value).partition("+")
    return f"{digits[:8] if len(digits) >= 40 and ' ' not in digits else digits}{sign}{rest}"
