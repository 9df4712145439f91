"""The command `tasuki`, also as `python -m tasuki`: Ctrl-C ends it without a traceback."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line, whose import alone takes a while."""
    try:
        from tasuki import cli

        cli.main()
    except KeyboardInterrupt:
        sys.exit(130)  # as a shell has it


if __name__ == "__main__":  # not in a process that one of ours spawns
    main()
