"""Which paths the router answers, refuses and passes on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.http.paths import PathKind, kind_of

ADMIN = [
    "/update_weights_from_tensor",
    "/update_weights_from_disk",
    "/update_weights_from_distributed",
    "/update_weights_from_ipc",
    "/update_weight_version",
    "/init_weights_update_group",
    "/destroy_weights_update_group",
    "/init_weights_send_group_for_remote_instance",
    "/send_weights_to_remote_instance",
    "/begin_weight_update",
    "/end_weight_update",
    "/get_weights_by_name",
    "/weights_checker",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/start_profile",
    "/stop_profile",
    "/pause_generation",
    "/continue_generation",
    "/scale_elastic_ep",
    "/pull_weights",
    "/v1/load_lora_adapter",
    "/reset_prefix_cache",
    "/sleep",
    "/list_external_corpora",
    "/load_lora_adapter",
    "/unload_lora_adapter",
    "/set_internal_state",
    "/configure_logging",
    "/slow_down",
    "/freeze_gc",
    "/hicache/storage-backend/clear",
    "/dumper/configure",
]


@pytest.mark.parametrize("path", ADMIN)
def test_admin_paths_are_refused(path: str) -> None:
    assert kind_of(path) is PathKind.ADMIN


@pytest.mark.parametrize(
    "path",
    [
        "/pause_generation/",
        "//pause_generation",
        "/./pause_generation",
        "/x/../pause_generation",
        "/%70ause_generation",
        "/%2570ause_generation",
        "/PAUSE_generation",
        "/pause_generation;v=1",
        "/x%2f..%2fpause_generation",
        "\\pause_generation",
        "/;v=1/pause_generation",
        "/%20/pause_generation",
        "/x/..;v=1/pause_generation",
        "/%00/pause_generation",
        "/%00pause_generation",
        "/%25252525252570ause_cache",
    ],
)
def test_no_spelling_of_an_admin_path_passes(path: str) -> None:
    assert kind_of(path) is PathKind.ADMIN


@pytest.mark.parametrize(
    "path",
    [
        "/generate",
        "/v1/chat/completions",
        "/v1/models/set_of_models",
        "/model_info",
        "/server_info",
        "/get_weight_version",
        "/open_session",
        "/",
        "/ping",
        "/a%20b",
    ],
)
def test_engine_paths_pass(path: str) -> None:
    assert kind_of(path) is PathKind.PASS


@pytest.mark.parametrize(
    "path",
    [
        "/workers",
        "/workers/http://h:1",
        "/readyz",
        "/healthz",
        "/metrics",
        "/router/metrics",
        "/health",
        "/health_generate",
        "/ready",
        "/abort_request",
        "/flush_cache",
        "/v1/models",
        "/v1/loads",
        "/get_load",
        "/engine_metrics",
        "//flush_cache/",
        "/%66lush_cache",
        "/Workers",
    ],
)
def test_what_means_all_workers_or_the_router_stays(path: str) -> None:
    assert kind_of(path) is PathKind.CONTROL


def test_a_path_of_many_escapes_is_read_in_no_time() -> None:
    assert kind_of("/%" + "25" * 30_000 + "41") is PathKind.ADMIN


@st.composite
def disguised(draw: st.DrawFn) -> str:
    """An admin path as somebody might write it who wants it passed on."""
    path = draw(st.sampled_from(ADMIN))
    chars = [
        draw(st.sampled_from([char, char.upper(), f"%{ord(char):02x}", f"%25{ord(char):02X}"])) for char in path[1:]
    ]
    before = draw(st.sampled_from(["/", "//", "/./", "/x/../", "/%2e/", "/;/../", "\\\\", "/%2f"]))
    return before + "".join(chars) + draw(st.sampled_from(["", "/", ";a=b", "/.", "%20", "//x/.."]))


@given(disguised())
def test_no_disguise_gets_an_admin_path_passed_on(path: str) -> None:
    assert kind_of(path) is not PathKind.PASS


@given(st.text(max_size=60))
def test_every_path_has_a_meaning(path: str) -> None:
    assert kind_of("/" + path) in PathKind
