"""Checkpoints: writing, verifying, retention, loading."""
