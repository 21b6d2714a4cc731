"""What turns gradients into new weights: optimizers, schedules, precision, clipping, averages of the weights."""
