"""Which class a path is counted under. Pure; the classes are few and fixed, whatever clients ask for."""

import re

OTHER = "other"
NAMES: dict[str, str] = {
    "/generate": "generate",
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1/embeddings": "embeddings",
    "/encode": "embeddings",
    "/v1/score": "score",
    "/classify": "score",
    "/v1/classify": "score",
    "/v1/rerank": "rerank",
    "/rerank": "rerank",
    "/tokenize": "tokenize",
    "/v1/tokenize": "tokenize",
    "/detokenize": "tokenize",
    "/v1/detokenize": "tokenize",
    "/v1/models": "models",
    "/get_model_info": "models",
    "/model_info": "models",
    "/get_server_info": "server",
    "/server_info": "server",
    "/v1/loads": "server",
    "/get_load": "server",
    "/health": "health",
    "/health_generate": "health",
    "/ready": "health",
    "/healthz": "health",
    "/liveness": "health",
    "/readiness": "health",
    "/readyz": "health",
    "/metrics": "metrics",
    "/engine_metrics": "metrics",
    "/router/metrics": "metrics",
    "/abort_request": "abort",
    "/flush_cache": "flush",
    "/workers": "control",
    "/add_worker": "control",
    "/remove_worker": "control",
    "/list_workers": "control",
}
ADMIN = "admin"
CLASSES = frozenset((*NAMES.values(), ADMIN, OTHER))
"""All that there are. `admin` is given by who knows that a path is an engine's admin path."""

_CONTROL = re.compile(r"/(workers|router)/")


def path_class_of(path: str) -> str:
    """The class of a path without query."""
    found = NAMES.get(path)
    if found is not None:
        return found
    return "control" if _CONTROL.match(path) else OTHER
