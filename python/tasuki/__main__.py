"""`python -m tasuki`: the same command line without an installed script."""

from tasuki.cli import main

main()
