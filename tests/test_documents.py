"""What the documents say about flags and files is true."""

import re
from pathlib import Path

import pytest

from furlong.config import RunConfig
from furlong.config.alone import ROUTER
from furlong.config.miles import instead_of
from furlong.config.sections import Also
from furlong.config.sglrouter import INSTEAD, RENAMED, SWITCHES

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OF_COMMANDS = {
    "config",
    "data-binary",
    "dir",
    "firing",
    "help",
    "json",
    "keep-cursor",
    "level",
    "name",
    "option",
    "port",
    "rank",
    "run-dir",
    "service",
    "url",
}


def flags() -> set[str]:
    """Every flag of a run, without its dashes."""
    found = set()
    for name in RunConfig.model_fields:
        for field, info in type(getattr(RunConfig(), name)).model_fields.items():
            found.add(field.replace("_", "-"))
            found |= {other for item in info.metadata if isinstance(item, Also) for other in item.names}
    return found


def flags_of_routers() -> set[str]:
    """Those of the router alone, which need no prefix, and of sgl-router."""
    own = {field.removeprefix("router_").replace("_", "-") for field in ROUTER.offered["router"]}
    return own | {flag.name for flag in ROUTER.own} | {*INSTEAD, *RENAMED, *SWITCHES}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_flag_in_a_document_is_one_or_has_something_in_its_place(document: Path) -> None:
    said = set(re.findall(r"(?<![\w-])--([a-z][a-z0-9-]*[a-z0-9])(?![\w-])", document.read_text()))
    known = flags() | OF_COMMANDS | (flags_of_routers() if document.name == "router.md" else set())
    assert {flag for flag in said - known if not instead_of(flag)} == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_of_a_document_leads_to_a_file(document: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []
