"""One module for each tool whose result files can be read.

Each has `recognises`, which looks at a file's first JSON object and touches
nothing else, and `read`, which gives what the file holds.
"""
