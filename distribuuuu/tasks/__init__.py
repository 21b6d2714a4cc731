"""Tasks: what a model learns, from a batch of images to a loss and metrics.

- base.py: the contract of a task, and `build_task`. A new task is one class, see there.
- classification.py: one label or several labels per image. distillation.py: the same, with a teacher.
- airbench.py: lookahead and the schedule of airbench94, a task of one recipe.
- losses.py: add a loss here, or in a new file of this package, with `@LOSSES.register("name")`.
- metrics.py: add a metric here, or in a new file, with `@METRICS.register("name")`.
- meter.py: accumulation of the loss and the metrics over batches and processes.
"""
