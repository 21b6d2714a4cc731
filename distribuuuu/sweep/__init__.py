"""Preparation of many runs: splits of a data set."""
