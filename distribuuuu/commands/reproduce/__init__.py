"""Reruns of measured results."""
