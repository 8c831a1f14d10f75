"""The rows in Weights & Biases, through a process of its own (wandb_process.py). Imports no wandb.

One run of wandb for each run, its id kept in the sink's folder. Offline and online each have their own cursor: a run
that began offline has all its rows online once it is continued so.
"""

import asyncio
import os
from collections.abc import Mapping

from services.metrics.sinks.flags import wandb_mode
from services.metrics.sinks.process import ProcessSink
from services.metrics.sinks.shown_config import shown_config
from services.metrics.sinks.sink import Cursor, SinkContext, option_of

LOOK_S = 10.0
"""How often the server is asked how far it is, while something is on its way."""
STUCK_S = 120.0
LAGGING_AFTER_S = 90.0
"""wandb sends every 15 s."""
IDLE_AFTER_S = 600.0
"""A run of others' that is silent for so long is finished, and resumed when it speaks again."""
ALERT_TIMEOUT_S = 10.0
LEVELS = {"critical": "ERROR", "warning": "WARN"}


def make(options: Mapping[str, object], context: SinkContext) -> "WandbSink":
    """Options: project, group, team, run_name, dir, mode, init_timeout_s, look_s, stuck_s."""
    mode = option_of(options, context, "mode", str, wandb_mode(None, os.environ))
    if mode not in ("online", "offline"):
        raise context.refuse("mode", mode, "must be online or offline")
    folder = option_of(options, context, "dir", str, "") or str(context.run_dir.root)
    settings = {
        "project": option_of(options, context, "project", str, "furlong"),
        "group": option_of(options, context, "group", str, ""),
        "team": option_of(options, context, "team", str, ""),
        "name": option_of(options, context, "run_name", str, "") or context.run or "",
        "dir": str(context.path("dir", folder)),
        "mode": mode,
        "init_timeout_s": option_of(options, context, "init_timeout_s", float, 30.0),
        "finish_timeout_s": max(2.0, context.drain_budget_s / 2),
        "look_s": option_of(options, context, "look_s", float, LOOK_S),
        "stuck_s": option_of(options, context, "stuck_s", float, STUCK_S),
        "config": shown_config(context) or {"run": {"name": context.secrets.redact(context.run or "")}},
    }
    return WandbSink(settings, context)


class WandbSink(ProcessSink):
    """Rows and alerts of one run."""

    lagging_after_s = LAGGING_AFTER_S

    def __init__(self, settings: Mapping[str, object], context: SinkContext) -> None:
        super().__init__(
            "services.metrics.sinks.wandb_process.WandbRun",
            settings,
            context,
            start_timeout_s=float(str(settings["init_timeout_s"])) + 15.0,
            finish_timeout_s=float(str(settings["finish_timeout_s"])) + 5.0,
        )
        online = settings["mode"] == "online"
        self.cursor_name = f"{context.name}@{settings['mode']}"
        self.counts_safe = online
        self.tick_s = float(str(settings["look_s"])) if online else 5.0
        if context.run_config is None:
            self.idle_after_s = IDLE_AFTER_S

    async def start(self, durable: Cursor) -> Cursor:
        """Also tells how far the run is offline: what of it was uploaded by hand is there online."""
        place = await asyncio.to_thread(self._context.reader.cursor, f"{self.name}@offline")
        self._settings = {**self._settings, "offline_row": place[0]}
        return await super().start(durable)

    async def alert(self, alert: object) -> None:
        """Raise one of wandb's alerts: `rule`, `severity`, `summary` and `remedy` of it are shown. One of another run
        is none of ours, and one of a run that is finished comes too late.

        Raises SinkProcessFailed or TimeoutError when wandb does not take it.
        """
        run = str(getattr(alert, "run", ""))
        if run != (self._context.run or "") or self.is_finished:
            return
        given = {
            "title": f"{getattr(alert, 'rule', 'alert')}: {run}",
            "text": f"{getattr(alert, 'summary', '')}\n\n{getattr(alert, 'remedy', '')}",
            "level": LEVELS.get(str(getattr(alert, "severity", "")), "INFO"),
        }
        await self.call("alert", given, timeout_s=ALERT_TIMEOUT_S)
