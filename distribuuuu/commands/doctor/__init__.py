"""Checks of a data set before training: layout, findings and their report."""
