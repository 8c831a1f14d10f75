"""Alerts by HTTP: a plain JSON object, or the shape that Slack takes. A URL may be a secret and is never logged."""

from datetime import UTC, datetime
from typing import Any

import orjson

from services.metrics.alerts.alert import Alert, State
from services.metrics.alerts.delivery import NotWanted
from services.metrics.sinks.post import LATER, Poster, PostFailed

TIMEOUT_S = 10.0


class Webhook:
    """A target that posts."""

    def __init__(self, name: str, url: str, *, slack: bool = False) -> None:
        self.name, self.timeout_s = name, TIMEOUT_S + 2.0
        self._poster, self._slack = Poster(url, limit_s=TIMEOUT_S), slack

    async def send(self, alert: Alert) -> None:
        """Post it. Raises NotWanted for what will never be taken, PostFailed."""
        body = slack_body(alert) if self._slack else plain_body(alert)
        headers = {"Content-Type": "application/json", "User-Agent": "furlong"}
        try:
            await self._poster.post(orjson.dumps(body), headers)
        except PostFailed as error:
            if 400 <= error.status < 500 and error.status not in LATER:
                raise NotWanted(str(error)) from None
            raise
        finally:
            await self._poster.close()  # alerts are rare


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
