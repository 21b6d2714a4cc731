"""What surrounds the training loop: state, evaluation, dry run, preflight, set-up, stopping."""
