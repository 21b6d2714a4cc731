"""The optional commands of the project: each can be deleted with its tests and its page."""

# Name -> what is deleted with it, relative to the root of the project.
OPTIONAL_COMMANDS = {
    "doctor": ("distribuuuu/commands/doctor", "tests/commands/doctor", "docs/doctor.md"),
    "export": ("distribuuuu/commands/export", "tests/commands/export", "docs/export.md"),
    "pack": ("distribuuuu/commands/pack", "tests/commands/pack", "tools/pack_dataset.py"),
    "plan": ("distribuuuu/commands/plan", "tests/commands/plan", "docs/plan.md"),
    "predict": ("distribuuuu/commands/predict", "tests/commands/predict", "docs/predict.md"),
    "probe": ("distribuuuu/commands/probe", "tests/commands/probe", "docs/probe.md"),
    "report": ("distribuuuu/commands/report", "tests/commands/report", "docs/report.md", "docs/compare.md"),
    "compare": ("distribuuuu/commands/report", "tests/commands/report", "docs/report.md", "docs/compare.md"),
    "split": ("distribuuuu/commands/split", "tests/commands/split"),
    "sweep": ("distribuuuu/commands/sweep", "tests/commands/sweep", "docs/sweep.md"),
    "table": ("distribuuuu/commands/table", "tests/commands/table", "tools/make_table.py"),
    "time": ("distribuuuu/commands/time", "tests/commands/time", "tools/time_net.py"),
}
