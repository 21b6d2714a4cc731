"""Tasks, from a batch to a loss and metrics: a task, a loss or a metric is one class in a file here."""
