"""How the router says that it is."""

from services.router.workers.workers import State
from tests.router.conftest import Running, StartWorker
from tests.router.control.calling import call
from tests.router.raw_client import exchange, get, post


async def test_not_ready_until_a_worker_is(router: Running, start_worker: StartWorker) -> None:
    for path in ("/healthz", "/liveness"):
        assert (await call(router, "GET", path))[0] == 200
    for path in ("/readyz", "/readiness", "/health", "/health_generate", "/ready"):
        status, said = await call(router, "GET", path)
        assert status == 503 and said["error"]["type"] == "no_ready_worker"
    worker = await start_worker()
    worker.ready_status = b"503 Paused"
    await router.add(worker, until_ready=False)
    assert (await call(router, "GET", "/readyz"))[0] == 503
    worker.ready_status = b"200 OK"
    await router.until_state(worker.url, State.READY)
    for path in ("/readyz", "/readiness", "/health", "/health_generate", "/ready"):
        assert (await call(router, "GET", path))[0] == 200
    assert worker.requests == []


async def test_counters(router: Running, start_worker: StartWorker) -> None:
    await router.add(await start_worker(lambda seen: seen.answer(b"", status=b"500 Oops")))
    for _ in range(2):
        await exchange(router.port, post(b"/generate"))
    said = (await call(router, "GET", "/router/metrics"))[1]
    assert said == {
        "num_workers": 1,
        "num_ready_workers": 1,
        "num_waiting": 0,
        "num_in_flight": 0,
        "num_requests": 2,
        "num_failures": 2,
    }


async def test_health_may_be_asked_without_a_body(router: Running, start_worker: StartWorker) -> None:
    await router.add(await start_worker())
    for path in (b"/health", b"/readyz", b"/healthz", b"/liveness", b"//health/"):
        answer = await exchange(router.port, get(path, method=b"HEAD"))
        assert answer.status == 200 and answer.body == b""
