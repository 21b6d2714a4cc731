"""Weight updates: optimizers, schedules, precision, clipping, averages of the weights."""
