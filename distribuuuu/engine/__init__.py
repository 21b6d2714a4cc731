"""Parts around the training loop: building a run, its state and resuming, evaluation, dry run, lock, stop."""
