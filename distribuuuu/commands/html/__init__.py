"""HTML pages, shared by the commands report and sweep. A page is one file without links to anything else.

- page.py: the page, its sections, tables and galleries; templates/: its HTML, style sheet and script.
- charts.py: line charts as SVG; history.py: the course of a run.
"""
