"""HTML reports of finished runs; nothing in the core imports this package.

A report is one file without links, scripts or images from elsewhere.

- page.py: the page, its sections, tables and galleries; style.py: its style sheet and script.
- charts.py: line charts, bars and heat maps as SVG.
"""
