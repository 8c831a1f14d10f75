"""Flags of sgl-router and what they are here: taken where they mean the same, else refused with what stands in their
place. Also spellings of launchers that hand their router's flags on (`--router-policy`, `--sglang-router-port`). Pure.
"""

from collections.abc import Sequence

from furlong.config.errors import ConfigError, Problem

PREFIXES = ("sglang-router-", "router-")

RENAMED = {
    "ip": "host",
    "request-timeout-secs": "total-timeout-s",
    "queue-size": "max-queued",
    "queue-timeout-secs": "queue-timeout-s",
    "retry-max-retries": "max-tries",
    "cb-failure-threshold": "breaker-failures",
    "cb-timeout-duration-secs": "breaker-pause-s",
    "health-failure-threshold": "health-fail-threshold",
    "health-check-timeout-secs": "health-timeout-s",
    "health-check-interval-secs": "health-interval-s",
    "shutdown-grace-period-secs": "drain-budget-s",
    "max-payload-size": "max-body-bytes",
    "tls-cert-path": "tls-cert",
    "tls-key-path": "tls-key",
    "ca-cert-paths": "worker-ca",
}
"""sgl-router's name -> ours, with the same value."""
SWITCHES = {"disable-retries": ("max-tries", "1"), "disable-circuit-breaker": ("breaker-failures", "1000000000")}
VALUES = {
    "policy": {"cache_aware": "prefix", "round_robin": "round-robin", "power_of_two": "power-of-two"},
    "log-level": {"warn": "warning"},
}
"""Flag -> sgl-router's value -> ours."""

_NO_PD = "Prefill and decode workers apart are not offered; leave it out."
_NO_DISCOVERY = "Workers come by --worker-urls, or register themselves by POST /workers."
_NO_TOKENIZER = "Bodies are passed on as they are, so that no model or tokenizer is needed; leave it out."
_NO_BACKOFF = "The next worker is tried at once; --max-tries says how many."
_NO_TREE = "--prefix-chars says how much of a prompt decides, --bounded-load how uneven the load may become."
_PROMETHEUS = "Metrics are at /metrics of --port itself; leave it out."
_NO_WAIT = "A worker that is down is looked after until it comes; leave it out."
_PER_WORKER = "--max-in-flight limits the requests of each worker, --max-queued how many wait."
_ONE_AT_A_TIME = (
    "An open breaker lets one request at a time through; --breaker-failures and --breaker-pause-s say when."
)
_OWN_STORE = "Nothing of a conversation is kept here; leave it out."

INSTEAD = {
    "api-key": "--token-file FILE protects the router; the key of a worker is given at its registration.",
    "control-plane-api-keys": "--token-file FILE holds the one token that control paths need.",
    "assignment-mode": "Give --policy session; least in flight takes a new session.",
    "backend": _OWN_STORE,
    "balance-abs-threshold": _NO_TREE,
    "balance-rel-threshold": _NO_TREE,
    "bucket-adjust-interval-secs": _NO_PD,
    "cache-threshold": _NO_TREE,
    "cb-success-threshold": _ONE_AT_A_TIME,
    "cb-window-duration-secs": _ONE_AT_A_TIME,
    "chat-template": _NO_TOKENIZER,
    "cors-allowed-origins": "Headers of workers pass; put what browsers need before the router.",
    "decode": _NO_PD,
    "decode-policy": _NO_PD,
    "decode-selector": _NO_DISCOVERY,
    "disable-health-check": "Probes are what brings a worker back; --health-interval-s says how often they are sent.",
    "dp-aware": "Data-parallel ranks are the engine's own matter; leave it out.",
    "enable-igw": "Workers of one router serve one model; leave it out.",
    "eviction-interval-secs": _NO_TREE,
    "health-check-endpoint": "Probes choose among the paths that SGLang has by themselves; leave it out.",
    "history-backend": _OWN_STORE,
    "log-dir": "Logs are in --dir, under logs/.",
    "max-concurrent-requests": _PER_WORKER,
    "max-idle-secs": _NO_TREE,
    "max-tree-size": _NO_TREE,
    "mcp-config-path": _OWN_STORE,
    "mini-lb": _NO_PD,
    "model-path": _NO_TOKENIZER,
    "pd-disaggregation": _NO_PD,
    "prefill": _NO_PD,
    "prefill-policy": _NO_PD,
    "prefill-selector": _NO_DISCOVERY,
    "prometheus-duration-buckets": _PROMETHEUS,
    "prometheus-host": _PROMETHEUS,
    "prometheus-port": _PROMETHEUS,
    "rate-limit-tokens-per-second": _PER_WORKER,
    "reasoning-parser": "Answers are passed on as they are: give it to the engine.",
    "request-id-headers": "The header is x-request-id.",
    "retry-backoff-multiplier": _NO_BACKOFF,
    "retry-initial-backoff-ms": _NO_BACKOFF,
    "retry-jitter-factor": _NO_BACKOFF,
    "retry-max-backoff-ms": _NO_BACKOFF,
    "selector": _NO_DISCOVERY,
    "service-discovery": _NO_DISCOVERY,
    "service-discovery-namespace": _NO_DISCOVERY,
    "service-discovery-port": _NO_DISCOVERY,
    "tokenizer-path": _NO_TOKENIZER,
    "tool-call-parser": "Answers are passed on as they are: give it to the engine.",
    "worker-startup-check-interval": _NO_WAIT,
    "worker-startup-timeout-secs": _NO_WAIT,
}
"""sgl-router's name -> what to do instead, as a sentence."""
_POLICIES = {
    "random": "Give --policy least-in-flight, which is better, or power-of-two.",
    "manual": "Give --policy session --session-key header:x-smg-routing-key.",
}


def from_sgl_router(words: Sequence[str]) -> list[str]:
    """A command line with sgl-router's flags in our spelling, without prefixes. Raises ConfigError for all that are
    not ours."""
    taken: list[str] = []
    problems: list[Problem] = []
    flag = ""
    for word in words:
        if not word.startswith("--"):
            taken.append(_value(flag, word, problems))
            continue
        given, has_value, value = word.removeprefix("--").partition("=")
        flag = without_prefix(given)
        if flag in INSTEAD:
            problems.append(
                Problem(f"--{given}", "", "is a flag of sgl-router that this router does not have", INSTEAD[flag])
            )
            continue
        if flag in SWITCHES and not has_value:
            name, switched = SWITCHES[flag]
            taken += [f"--{name}", switched]
            continue
        flag = RENAMED.get(flag, flag)
        taken.append(f"--{flag}={_value(flag, value, problems)}" if has_value else f"--{flag}")
    if problems:
        raise ConfigError(problems)
    return taken


def without_prefix(name: str) -> str:
    """A flag's name, without dashes, as this command has it: `router-policy` is `policy`."""
    kebab = name.replace("_", "-")
    off, bare = ("no-", kebab.removeprefix("no-")) if kebab.startswith("no-") else ("", kebab)
    for prefix in PREFIXES:
        bare = bare.removeprefix(prefix)
    return off + bare


def _value(flag: str, value: str, problems: list[Problem]) -> str:
    if flag == "policy":
        if value in _POLICIES:
            problems.append(Problem("--policy", value, "is a policy that this router does not have", _POLICIES[value]))
        return VALUES[flag].get(value, value.replace("_", "-"))
    return VALUES.get(flag, {}).get(value, value)
