"""Which implementation computes a layer's GEMMs: measured on this machine, kept, reproducible.

measure.py   a model's stages and their candidates, timed one after another
timer.py     repeated turns, in CUDA graphs
decide.py    timings in, choice out
table.py     choices by stage and number of rows
store.py     the table of this machine in the cache folder
"""
