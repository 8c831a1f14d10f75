"""The alerts as a part of the metrics service: the engine, the targets that its configuration names, the streams."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING

import orjson

from furlong.alertrules import choose_rules
from furlong.alertrules.webhook_urls import check_webhooks, slack_url
from furlong.config import ConfigError
from furlong.config.destinations import url_of
from services.metrics.alerts.alert import Alert
from services.metrics.alerts.core import SinkFacts
from services.metrics.alerts.delivery import Delivery, Target
from services.metrics.alerts.engine import AlertEngine
from services.metrics.alerts.targets import FileTarget, LogTarget
from services.metrics.alerts.wandb_delivery import WandbDelivery
from services.metrics.alerts.watching import AlertStreams
from services.metrics.alerts.webhooks import Webhook

if TYPE_CHECKING:
    from services.metrics.parts import Parts

CLOSE_S = 3.0
"""How long targets may take to be given the last alerts."""


class Alerts:
    """What other parts may use."""

    def __init__(self, engine: AlertEngine, streams: AlertStreams) -> None:
        self.engine, self.streams = engine, streams

    def firing(self) -> list[Alert]:
        """What fires now, oldest first. Event loop only."""
        return self.engine.firing()


@contextlib.asynccontextmanager
async def watching_alerts(parts: "Parts") -> AsyncGenerator[Alerts]:
    """Raises ConfigError for rules and addresses that cannot be used."""
    metrics = parts.context.config.metrics
    problems = check_webhooks(metrics.alert_webhook, metrics.alert_slack_webhook_file)
    if problems:
        raise ConfigError(problems)
    chosen = choose_rules(metrics)

    async def sinks() -> list[SinkFacts]:
        states = await parts.sinks.states(exact=False)
        return [SinkFacts(one.name, one.state, one.num_rows_behind, one.last_error) for one in states]

    engine = AlertEngine(
        chosen, own_run=parts.context.config.run.name, reader=parts.reader, writer=parts.writer, sinks=sinks
    )
    streams = AlertStreams(engine.ledger, chosen.rules.values())
    wandb = WandbDelivery(lambda: parts.sinks, parts.sinks.following, engine.ledger, parts.writer)
    await wandb.start()
    deliveries = [*(Delivery(target, engine.ledger, parts.writer) for target in _targets(parts)), wandb]

    def told(alerts: Sequence[Alert]) -> None:
        streams.notify()
        for delivery in deliveries:
            delivery.notify()
        for alert in alerts:
            parts.feed.publish_alert(alert.id, alert.run, orjson.dumps(alert.to_json()))

    engine.on_alerts.append(told)
    parts.on_news.append(engine.notify)
    parts.writer.on_notable = engine.take_notable
    running = parts.context.watch(asyncio.create_task(engine.run(), name="alerts"))
    try:
        yield Alerts(engine, streams)
    finally:
        parts.writer.on_notable = None
        parts.on_news.remove(engine.notify)
        await engine.close(running)
        await asyncio.gather(*(delivery.close(min(CLOSE_S, parts.left_s())) for delivery in deliveries))


def _targets(parts: "Parts") -> list[Target]:
    metrics, run_dir = parts.context.config.metrics, parts.context.run_dir
    targets: list[Target] = [LogTarget(), FileTarget(run_dir.alerts)]
    if metrics.alert_webhook:
        targets.append(Webhook("webhook", url_of(metrics.alert_webhook)))
    if url := slack_url(metrics.alert_slack_webhook_file):
        targets.append(Webhook("slack", url, slack=True))
    return targets
