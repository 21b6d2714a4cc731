"""The number of lines of the core: what a fork reads."""

from support.runs import ROOT

PACKAGE = ROOT / "distribuuuu"
# Not in the core: the commands, packing, data at a URL, decoders of optional packages, the check of data, deployment,
# sweeps and reports of runs.
OPTIONAL_FILES = ("__main__.py", "data/optional_decoders.py")
OPTIONAL = ("cli", "deploy", "sweep", "data/packing", "data/doctor", "data/remote", "report")
LOGGING = ("report/run_log.py", "report/log_table.py", "report/record_files.py", "report/step_timing.py")


def count_core_lines() -> int:
    """Return the number of lines of the files of the core."""
    optional = {path for room in OPTIONAL for path in (PACKAGE / room).rglob("*.py")}
    core = {*PACKAGE.rglob("*.py")} - optional - {PACKAGE / name for name in OPTIONAL_FILES} | {
        PACKAGE / name for name in LOGGING
    }
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in core)
