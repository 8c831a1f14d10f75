"""The door: tells requests apart and gives each to who answers it: a passage to a worker, the control surface, or a
refusal."""

from typing import TYPE_CHECKING

from services.router.http.asgi import App
from services.router.http.bridge import Bridge
from services.router.http.exchange import Exchange, RefusedExchange
from services.router.http.passage import Passage
from services.router.http.paths import PathKind
from services.router.http.proxy import Proxy
from services.router.http.request import Request

if TYPE_CHECKING:
    from services.router.http.client import ClientConnection


class Front:
    """Makes exchanges.

    control: the ASGI application that answers what is not passed on.
    """

    def __init__(self, proxy: Proxy, control: App) -> None:
        self.proxy = proxy
        self._control = control

    def exchange_for(self, to: "ClientConnection", request: Request) -> Exchange:
        """Who answers this request. Nothing has begun yet."""
        proxy = self.proxy
        if request.objection is not None:
            return RefusedExchange(to, request, proxy.observer)
        if request.place.kind is PathKind.PASS:
            return Passage(to, request, proxy)
        return Bridge(to, request, proxy.observer, self._control, proxy.settings)
