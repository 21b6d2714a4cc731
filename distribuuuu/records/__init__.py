"""Records that every run writes: its log, metrics, results, predictions, environment and trackers."""
