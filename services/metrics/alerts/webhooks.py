"""Alerts by HTTP: a plain JSON object, or the shape that Slack takes. A URL may be a secret and is never logged."""

import asyncio
import contextlib
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import orjson

from services.metrics.alerts.alert import Alert, State
from services.metrics.alerts.delivery import NotWanted

TIMEOUT_S = 10.0
TRY_AGAIN = (408, 425, 429)
"""Refusals that pass; all others below 500 are for good."""


class Webhook:
    """A target that posts."""

    def __init__(self, name: str, url: str, *, slack: bool = False) -> None:
        self.name, self.timeout_s = name, TIMEOUT_S + 2.0
        self._url, self._slack = url, slack

    async def send(self, alert: Alert) -> None:
        """Post it, off the event loop. Raises NotWanted, OSError."""
        body = slack_body(alert) if self._slack else plain_body(alert)
        await in_daemon(lambda: self._post(orjson.dumps(body)))

    def _post(self, body: bytes) -> None:
        headers = {"Content-Type": "application/json", "User-Agent": "furlong"}
        request = urllib.request.Request(self._url, data=body, headers=headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                answer.read(1024)
        except urllib.error.HTTPError as error:
            with error:
                said = error.read(200).decode(errors="replace")
            if error.code < 500 and error.code not in TRY_AGAIN:
                raise NotWanted(f"HTTP {error.code}: {said}") from None
            raise OSError(f"HTTP {error.code}: {said}") from None
        except urllib.error.URLError as error:
            raise OSError(f"{error.reason}") from None  # the URL is not in it


async def in_daemon(work: Callable[[], None]) -> None:
    """Do it in a thread that an end of the process does not wait for. Raises what it raises."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def finish(error: Exception | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def run() -> None:
        error: Exception | None = None
        try:
            work()
        except Exception as raised:  # handed to who waits
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(finish, error)

    threading.Thread(target=run, name="alert-post", daemon=True).start()
    await done


def plain_body(alert: Alert) -> dict[str, Any]:
    """All that the alert has, and when it was as text."""
    return {**alert.to_json(), "at": datetime.fromtimestamp(alert.at_us / 1e6, UTC).isoformat()}


def slack_body(alert: Alert) -> dict[str, Any]:
    """As Slack's incoming webhooks take it: `text` for notifications, an attachment with a colour for the eye."""
    firing = alert.state is State.FIRING
    colour = {"critical": "danger", "warning": "warning"}.get(alert.severity, "warning") if firing else "good"
    head = f"{alert.severity} {alert.rule}" if firing else f"resolved {alert.rule}"
    where = f"{alert.axis} {alert.step}" if alert.axis else "service"
    text = escaped(f"[{alert.run}] {head}: {alert.summary}")
    fields = [{"title": "where", "value": escaped(where), "short": True}]
    if firing:
        fields.append({"title": "what to do", "value": escaped(alert.remedy), "short": False})
    attachment = {"color": colour, "fallback": text, "text": escaped(alert.summary), "fields": fields}
    return {"text": text, "attachments": [{**attachment, "ts": alert.at_us // 1_000_000}]}


def escaped(text: str) -> str:
    """Slack's three control characters; a metric's name must not mention people or make links."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
