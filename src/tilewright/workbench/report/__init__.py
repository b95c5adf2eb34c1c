"""A report of records: one HTML page that needs nothing else, and the same in Markdown.

`entries.py` reads files, `sections.py` decides what is told, `charts.py` draws, and `page.py` and `markdown.py` write it.
"""
