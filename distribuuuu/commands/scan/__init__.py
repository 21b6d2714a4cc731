"""Passes over the images of a data set, shared by several commands: measurements, splits, and resumable output."""
