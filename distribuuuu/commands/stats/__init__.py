"""What several commands compute from the records of runs: rows of seeds, significance, recorded predictions."""
