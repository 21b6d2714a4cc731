"""Pages about one run (report) and about several (compare).

- run_report.py: the page of one run; its figures (prediction_figures.py), and thumbnails (pictures.py).
- compare_page.py: differences between runs, and their page.
"""
