"""Pages about one run (report: run_report.py), and comparisons of two (compare: comparison.py)."""
