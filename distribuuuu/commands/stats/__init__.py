"""Statistics of recorded runs that several commands share: rows of seeds, significance, recorded predictions."""
