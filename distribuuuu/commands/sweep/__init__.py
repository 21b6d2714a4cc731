"""Searches of options by many runs, with Optuna, on one machine or several."""
