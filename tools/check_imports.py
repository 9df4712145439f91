"""Holds "what may import what" (ARCHITECTURE.md), for Python and for the Rust crates.

Nothing is imported: Python is parsed, crates are read from their Cargo.toml.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

# A library that few modules own; nobody else may import it.
OWNED_LIBRARIES = {
    "nixl": ("tasuki.kv.nixl_agent",),
    "nixl_cu12": ("tasuki.kv.nixl_agent",),
    "nixl_cu13": ("tasuki.kv.nixl_agent",),
    "mooncake": ("tasuki.kv.mooncake_engine",),
    "flashinfer": ("tasuki.attention.flashinfer", "tasuki.attention.flashinfer_kernels"),
    "ray": ("tasuki.launch.on_ray", "tasuki.launch.ray_child", "tasuki.launch.ray_process"),
    "matplotlib": ("tasuki.plot.labels", "tasuki.plot.png"),
    "plotly": ("tasuki.plot.html",),
}

# Libraries that a package never imports, not even in a function or for types.
FORBIDDEN_LIBRARIES = {"engine": {"torch", "triton"}}

# Modules that must not reach these, directly or through other modules of ours.
FORBIDDEN_REACH = {
    # A command's imports are its own.
    "tasuki.cli": ("torch", "transformers", "grpc", "matplotlib", "plotly", "ray"),
}

# What of ours a package may import, modules or whole packages; itself and the root always.
ALLOWED_PACKAGES = {
    "attention": {"device_limits", "engine.cache_groups", "overlap"},
    "engine": set(),
    "execution": {"attention", "engine"},
    "kv": {"background", "engine.api", "engine.cache_groups", "v1"},
    "models": {
        "attention",
        "device_limits",
        "engine.cache_groups",
        "execution.collective",
        "execution.forward",
        "overlap",
        "whole_file",
    },
    "worker": {
        "attention",
        "background",
        "command_line",
        "control_groups",
        "device_limits",
        "engine",
        "execution",
        "kv",
        "launch.parent_death",
        "models",
        "nvidia_driver",
        "options",
        "preflight",
        "processor",
        "v1",
    },
    "preflight": {"command_line", "kv", "nvidia_driver", "v1"},
    "doctor": {"command_line", "kv.fleet", "preflight.expect", "preflight.result", "v1"},
    "launch": {
        "command_line",
        "models",
        "nvidia_driver",
        "options",
        "processor",
        "worker.config",
        "worker.memory",
    },
    "bench": {
        "attention",
        "command_line",
        "engine",
        "execution",
        "kv",
        "launch",
        "models",
        "options",
        "processor",
        "v1",
        "whole_file",
        "worker",
    },
    "linkbench": {"bench", "command_line", "kv", "launch.parent_death", "v1"},
    "plot": {"whole_file"},
    "v1": {"v1"},
}

ALLOWED_CRATES = {
    "core": set(),
    "http1": {"searches"},
    "wire": set(),
    "text": {"searches"},
    "searches": set(),  # for tests only
    "policy": {"core", "searches"},
    "flow": {"core", "policy", "searches"},
    "sim": {"core", "flow", "policy"},
    "reqlog": {"core"},
    "plan": {"bench", "core", "flow", "policy", "reqlog", "sim"},
    "bench": {"core", "http1", "searches", "text"},
    # sim for tests only
    "router": {"core", "flow", "http1", "policy", "reqlog", "searches", "sim", "text", "wire"},
    "cpu": set(),
    "py": {"bench", "core", "cpu", "plan", "router"},
}


@dataclass(frozen=True, slots=True)
class Import:
    """One import statement.

    Attributes:
        module: What is imported, absolute.
        line: Where.
        on_load: Whether loading the importing module runs it.
    """

    module: str
    line: int
    on_load: bool


def imports_of(source: str, module: str, is_package: bool) -> Iterator[Import]:
    """Every import in `source`.

    Args:
        source: Python text.
        module: Its dotted name, for relative imports.
        is_package: Whether it is an `__init__.py`.
    """
    package = module.split(".") if is_package else module.split(".")[:-1]

    def visit(node: ast.AST, on_load: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, on_load)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:  # a name may be a submodule
                yield Import(f"{origin}.{alias.name}", node.lineno, on_load)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for child in node.body:
                yield from visit(child, False)
            for child in node.orelse:
                yield from visit(child, on_load)
        else:
            inner = on_load and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            for child in ast.iter_child_nodes(node):
                yield from visit(child, inner)

    yield from visit(ast.parse(source), True)


def read_modules(root: Path) -> dict[str, tuple[Path, list[Import]]]:
    """Every module under `root` (a folder that holds the package `tasuki`)."""
    modules = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        modules[name] = (path, list(imports_of(path.read_text(), name, is_package)))
    return modules


def check_python(root: Path) -> list[str]:
    """Violations in the package under `root`, one line each."""
    modules = read_modules(root)
    found = []
    for name, (path, imports) in modules.items():
        own = name.split(".")[1] if "." in name else ""
        for each in imports:
            library, _, rest = each.module.partition(".")
            owners = OWNED_LIBRARIES.get(library)
            if owners and name not in owners:
                found.append(f"{path}:{each.line}: only {', '.join(owners)} may import {library}")
            if library in FORBIDDEN_LIBRARIES.get(own, ()):
                found.append(f"{path}:{each.line}: tasuki.{own} may not import {library}")
            other = rest.split(".")[0]
            if library != "tasuki" or own not in ALLOWED_PACKAGES or other in ("", own, "errors"):
                continue
            allowed = (rest == a or rest.startswith(f"{a}.") for a in ALLOWED_PACKAGES[own])
            if f"tasuki.{other}" in modules and not any(allowed):
                found.append(f"{path}:{each.line}: tasuki.{own} may not import {each.module}")
    for name, forbidden in FORBIDDEN_REACH.items():
        if name in modules:
            found += _reach(name, forbidden, modules)
    return found + _circle(modules)


def _circle(modules: dict[str, tuple[Path, list[Import]]]) -> list[str]:
    """One circle of modules that import each other, in functions and for types too."""
    graph = {
        name: {target for i in imports for target in [*_modules_loaded(i.module, modules)][-1:]}
        for name, (_, imports) in modules.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        path, _ = modules[error.args[1][0]]
        return [f"{path}: a circle: {' <- '.join(error.args[1])}"]
    return []


def _reach(
    start: str, forbidden: tuple[str, ...], modules: dict[str, tuple[Path, list[Import]]]
) -> list[str]:
    found, seen, open_ends = [], {start}, [(start, start)]
    while open_ends:
        name, way = open_ends.pop()
        path, imports = modules[name]
        for each in (i for i in imports if i.on_load):
            for bad in forbidden:
                if each.module == bad or each.module.startswith(bad + "."):
                    found.append(f"{path}:{each.line}: {start} reaches {bad} ({way} -> {bad})")
            for target in _modules_loaded(each.module, modules):
                if target not in seen:
                    seen.add(target)
                    open_ends.append((target, f"{way} -> {target}"))
    return found


def _modules_loaded(module: str, modules: dict[str, tuple[Path, list[Import]]]) -> Iterator[str]:
    parts = module.split(".")
    for length in range(1, len(parts) + 1):  # parents are loaded too
        if (name := ".".join(parts[:length])) in modules:
            yield name


def check_crates(crates: Path) -> list[str]:
    """Violations among the crates' Cargo.toml files, one line each."""
    found = []
    for manifest in sorted(crates.glob("*/Cargo.toml")):
        crate = manifest.parent.name
        if crate not in ALLOWED_CRATES:
            found.append(
                f"{manifest}: unknown crate {crate}: say in {Path(__file__).name} its rule"
            )
            continue
        content = tomllib.loads(manifest.read_text())
        for table in ("dependencies", "dev-dependencies", "build-dependencies"):
            for name in content.get(table, {}):
                other = name.removeprefix("tasuki-")
                if other != name and other not in ALLOWED_CRATES[crate]:
                    found.append(f"{manifest}: {crate} may not depend on {other} ({table})")
    return found


def main() -> int:
    """Check this checkout."""
    checkout = Path(__file__).resolve().parent.parent
    found = check_python(checkout / "python") + check_crates(checkout / "crates")
    for line in found:
        print(line, file=sys.stderr)
    print(f"imports: {len(found)} violations" if found else "imports: every direction is right")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
