"""Exports of trained models, and their checks."""
