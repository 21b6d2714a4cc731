"""HTML reports of finished runs; nothing in the core imports this package.

A report is one file without links, scripts or images from elsewhere.

- page.py: the page, its sections, tables and galleries; templates/: its HTML, style sheet and script.
- charts.py: line charts, bars and heat maps as SVG.
- run_report.py: the report of one run; its figures (analysis.py), its course (history.py), and thumbnails (pictures.py)
  with saliency maps (saliency.py).
"""
