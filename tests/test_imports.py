"""Which modules may import what is heavy or a vendor's. Read from the source, so that lazy imports count too.

A vendor stands in few files, and the library imports none of them when it is imported (DESIGN: "Heavy imports").
Who imports whom among our own packages is checked by `lint-imports`.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("furlong", "services")
# Vendor -> the modules (with all below them) that may import it.
ALLOWED: dict[str, tuple[str, ...]] = {
    "torch": ("services.trainer", "services.rollout.engine", "furlong.checksum"),
    "transformers": ("services.trainer", "services.rollout.engine", "services.rollout.tokenizer"),
    "safetensors": ("services.trainer", "services.rollout.engine"),
    "tokenizers": ("services.rollout",),
    "wandb": ("services.metrics",),
    "fastapi": ("services.metrics", "services.router", "services.rollout.engine"),
    "uvicorn": ("services.metrics", "services.rollout.engine"),
    "uvloop": ("services.router", "services.rollout"),
    "httptools": ("services.router.http",),
    "aiohttp": ("services.rollout", "services.metrics"),
    "tensorboardX": ("services.metrics",),
    "mlflow": ("services.metrics",),
    "prometheus_client": ("services.metrics.prometheus", "services.metrics.engines.exposition"),  # writes; reads
    "opentelemetry": ("services.metrics",),
    "tyro": ("furlong.config",),
    "sglang": (),
    "ray": (),
    "megatron": (),
}
ONE_FILE = ("wandb", "tensorboardX", "mlflow", "opentelemetry")


@dataclass(frozen=True)
class Import:
    """One import statement."""

    importer: str
    """Dotted module."""
    imported: str
    """Dotted module."""
    when_imported: bool
    """It runs when the importer is imported; False: inside a function, or for the type checker only."""


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports() -> Iterator[Import]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield from imports_in(ast.parse(path.read_text()), module_name(path), when_imported=True)


def imports_in(node: ast.AST, importer: str, *, when_imported: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(importer, alias.name, when_imported) for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.module and not child.level:
            yield Import(importer, child.module, when_imported)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) or for_types_only(child):
            yield from imports_in(child, importer, when_imported=False)
        else:
            yield from imports_in(child, importer, when_imported=when_imported)


def for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def is_under(module: str, parents: tuple[str, ...]) -> bool:
    return any(module == parent or module.startswith(f"{parent}.") for parent in parents)


FOUND = list(imports())


@pytest.mark.parametrize("vendor", ALLOWED)
def test_vendor_is_imported_only_where_it_may(vendor: str) -> None:
    importers = {found.importer for found in FOUND if is_under(found.imported, (vendor,))}
    assert [name for name in sorted(importers) if not is_under(name, ALLOWED[vendor])] == []


@pytest.mark.parametrize("vendor", ONE_FILE)
def test_vendor_stands_in_one_file(vendor: str) -> None:
    assert len({found.importer for found in FOUND if is_under(found.imported, (vendor,))}) <= 1


def test_library_imports_no_vendor_when_it_is_imported() -> None:
    eager = {
        f"{found.importer} -> {found.imported}"
        for found in FOUND
        if found.when_imported and is_under(found.importer, ("furlong",)) and is_under(found.imported, tuple(ALLOWED))
    }
    assert eager == set()


def test_the_reader_of_imports_sees_lazy_and_eager_ones() -> None:
    """A check of the check: it would otherwise pass on an empty list."""
    code = "import torch.nn\nif TYPE_CHECKING:\n    import wandb\ndef f():\n    from ray.util import x"
    seen = {(found.imported, found.when_imported) for found in imports_in(ast.parse(code), "m", when_imported=True)}
    assert seen == {("torch.nn", True), ("wandb", False), ("ray.util", False)}
    assert len({found.importer for found in FOUND}) > 30
