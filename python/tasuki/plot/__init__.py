"""Pictures of benchmark results: PNG to look at, HTML to explore.

Reads result files only: ours ("tasuki.bench/1") and those of other tools
(`readers/`), all turned into one `Run`. `figures/` decides what a picture says,
without knowing who draws it; `png.py` and `html.py` draw.
"""
