"""How the router itself is: alive, ready, its counters. The engines' health paths ask the same of it.

GET /healthz, /liveness                                     the process answers
GET /readyz, /readiness, /health, /health_generate, /ready  a worker takes requests
GET /router/metrics                                         counters as JSON
"""

from fastapi import APIRouter

from services.router.control.refusals import answers, unavailable
from services.router.control.schemas import Alive, Counters, Ready
from services.router.http.paths import ALIVE, READINESS
from services.router.router import Router


def status_routes(router: Router) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    async def healthz() -> Alive:
        """The process answers."""
        return Alive()

    async def readyz() -> Ready:
        """Whether a worker takes requests."""
        if num_ready := router.workers.num_ready():
            return Ready(num_ready_workers=num_ready)
        raise unavailable(router.settings, "no_ready_worker", "no worker is ready")

    for path in ("/readyz", *sorted(READINESS)):
        routes.add_api_route(path, readyz, methods=["GET"], responses=answers(503))
        routes.add_api_route(path, readyz, methods=["HEAD"], include_in_schema=False)
    for path in sorted(ALIVE):
        routes.add_api_route(path, healthz, methods=["GET"])
        routes.add_api_route(path, healthz, methods=["HEAD"], include_in_schema=False)

    @routes.get("/router/metrics", responses=answers(401))
    async def counters() -> Counters:
        """Sums over the workers that are registered now, and of the queue."""
        everyone = router.workers.all()
        return Counters(
            num_workers=len(everyone),
            num_ready_workers=router.workers.num_ready(),
            num_waiting=router.workers.num_waiting(),
            num_in_flight=sum(worker.in_flight for worker in everyone),
            num_requests=sum(worker.num_requests for worker in everyone),
            num_failures=sum(worker.num_failures for worker in everyone),
        )

    return routes
