#!/bin/sh
# For RUSTC_WORKSPACE_WRAPPER: counts executed lines in crates of this workspace, not in others.
exec "$@" -Cinstrument-coverage
