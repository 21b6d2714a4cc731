"""Predictions of many image files."""
