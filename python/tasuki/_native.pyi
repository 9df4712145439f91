"""The Rust extension (crates/py)."""

__version__: str

def run_router(args: list[str]) -> int:
    """Run the router's command line (without the program's name); gives its exit code."""
