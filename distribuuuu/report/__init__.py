"""Logs, TensorBoard, results.json, environment facts, result tables."""
