"""Packing of a data set into a few large files, and their upload; data/packed/ holds the format and its reader."""
