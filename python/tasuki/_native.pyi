"""The Rust extension (crates/py)."""

__version__: str

def run_router(args: list[str]) -> int:
    """Run the router's command line (without the program's name); gives its exit code."""

def run_bench(args: list[str]) -> int:
    """Run a command of the load generator (its name comes first); gives its exit code."""

def block_hashes(
    identity: bytes, tenant: str, block_size_tokens: int, tokens: list[int]
) -> list[bytes]:
    """Hash all full blocks of `tokens`, in order, 16 bytes each (crates/core, block_hash.rs)."""
