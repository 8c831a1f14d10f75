"""Every route of the installed SGLang has a meaning here: none that changes an engine is passed on unasked.

Read from its source, without importing it, since what its own environment lacks says nothing of its routes.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from services.router.http.paths import PathKind, kind_of
from tests.sglang_environment import find_sglang

pytestmark = pytest.mark.sglang

ROUTERS = ("app", "router")
READS = {"get", "head"}
GENERATES = {
    "/api/chat",
    "/api/generate",
    "/api/show",
    "/classify",
    "/close_session",
    "/detokenize",
    "/encode",
    "/generate",
    "/invocations",
    "/open_session",
    "/parse_function_call",
    "/separate_reasoning",
    "/tokenize",
    "/v1/audio/transcriptions",
    "/v1/chat/completions",
    "/v1/classify",
    "/v1/completions",
    "/v1/decisions",
    "/v1/detokenize",
    "/v1/embeddings",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/rerank",
    "/v1/responses",
    "/v1/responses/{response_id}/cancel",
    "/v1/score",
    "/v1/systemone",
    "/v1/tokenize",
    "/vertex_generate",
}
"""What a client asks of one worker for itself, with other methods than GET. A route that is new in SGLang and stands
neither here nor among the admin paths fails this test: look what it does, then say so in one of the two places."""


@dataclass(frozen=True)
class Route:
    """A route as it stands in the source."""

    path: str
    methods: frozenset[str]
    is_admin: bool
    """SGLang itself wants a key for it, if it has one."""

    @property
    def only_reads(self) -> bool:
        return self.methods <= READS and not self.is_admin


def routes_of(source: str) -> Iterator[Route]:
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.AsyncFunctionDef | ast.FunctionDef):
            calls = [found for found in function.decorator_list if isinstance(found, ast.Call)]
            is_admin = any(isinstance(c.func, ast.Name) and c.func.id == "auth_level" for c in calls)
            for call in calls:
                made = call.func
                if not isinstance(made, ast.Attribute) or made.attr == "websocket":
                    continue
                if isinstance(made.value, ast.Name) and made.value.id in ROUTERS and (path := path_of(call)):
                    yield Route(path, methods_of(call, made.attr), is_admin)


def path_of(call: ast.Call) -> str:
    """The path as it is written, or its default where the environment may name another; empty: known only at run."""
    first = call.args[0] if call.args else None
    if isinstance(first, ast.Call) and len(first.args) == 2:
        first = first.args[1]
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else ""


def methods_of(call: ast.Call, name: str) -> frozenset[str]:
    if name != "api_route":
        return frozenset((name,))
    (listed,) = [keyword.value for keyword in call.keywords if keyword.arg == "methods"]
    assert isinstance(listed, ast.List)
    return frozenset(str(item.value).lower() for item in listed.elts if isinstance(item, ast.Constant))


@pytest.fixture(scope="module")
def routes() -> list[Route]:
    environment = find_sglang()
    assert environment is not None, "there is no SGLang here: `make sglang` makes .venv-sglang"
    (folder,) = Path(environment.python).parents[1].glob("lib/python3*/site-packages/sglang/srt/entrypoints")
    files = [path for path in folder.rglob("*.py") if "anthropic" not in str(path)]
    return [route for path in files for route in routes_of(path.read_text())]


def test_the_routes_are_found(routes: list[Route]) -> None:
    paths = {route.path for route in routes}
    assert len(paths) > 80 and {"/generate", "/v1/loads", "/scale_elastic_ep", "/pause_generation"} <= paths
    assert any(route.is_admin for route in routes) and any(route.only_reads for route in routes)


def test_what_sglang_guards_is_guarded_here(routes: list[Route]) -> None:
    passed = {route.path for route in routes if route.is_admin and kind_of(route.path) is PathKind.PASS}
    assert passed == set()


def test_no_route_that_changes_something_is_passed_on_unclassified(routes: list[Route]) -> None:
    changing = {route.path for route in routes if not route.only_reads}
    passed = {path for path in changing if kind_of(path) is PathKind.PASS}
    assert passed - GENERATES == set()


def test_generation_is_never_refused(routes: list[Route]) -> None:
    assert {path for path in GENERATES if kind_of(path) is not PathKind.PASS} == set()
    assert {route.path for route in routes} >= GENERATES
