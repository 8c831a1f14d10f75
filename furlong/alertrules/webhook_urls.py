"""Where alerts are posted to. The URL of a Slack webhook is a secret: it comes from a file or the environment."""

import os
from collections.abc import Mapping
from pathlib import Path

from furlong.config.destinations import given_url_problem, url_problem
from furlong.config.errors import Problem

SLACK_VARIABLE = "FURLONG_SLACK_WEBHOOK_URL"


def slack_url(file: str, environment: Mapping[str, str] = os.environ) -> str:
    """The URL of the Slack webhook from its file or the environment. Empty: there is none. Raises OSError."""
    if file:
        return Path(file).read_text(encoding="utf-8").strip()
    return environment.get(SLACK_VARIABLE, "").strip()


def check_webhooks(webhook: str, slack_file: str, environment: Mapping[str, str] = os.environ) -> list[Problem]:
    """What is wrong with the addresses. Sends nothing; no URL of Slack is in what it says."""
    problems = []
    if webhook and (rule := given_url_problem(webhook)):
        problems.append(Problem("metrics.alert_webhook", "(not shown)", rule, "Give the whole URL."))
    try:
        url = slack_url(slack_file, environment)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        rule = f"must be a file that can be read: {why}"
        return [*problems, Problem("metrics.alert_slack_webhook_file", slack_file, rule, "See its path and mode.")]
    if (url or slack_file) and url_problem(url):
        source = slack_file or SLACK_VARIABLE
        rule = "must hold a URL that begins with https://"
        problems.append(Problem("metrics.alert_slack_webhook_file", source, rule, "Put the URL alone into it."))
    return problems
