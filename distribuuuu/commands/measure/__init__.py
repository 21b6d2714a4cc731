"""Measurement of the speed of a run, shared by the commands time and plan."""
