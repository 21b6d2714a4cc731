"""Pages about one run (report) and about several (compare).

- run_report.py: the page of one run; its figures (prediction_figures.py), and thumbnails (pictures.py).
- confidence.py: its section on calibration; comparison.py: differences between runs.
"""
