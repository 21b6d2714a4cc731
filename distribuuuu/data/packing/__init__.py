"""Packing a data set into a few large files."""
