"""`python -m tasuki`: the same command line without an installed script."""

from tasuki.cli import main

if __name__ == "__main__":  # not in a process that one of ours spawns
    main()
