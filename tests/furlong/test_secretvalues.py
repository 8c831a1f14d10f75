"""What of an environment is secret, and what stays legible."""

from pathlib import Path

import pytest

from furlong.jsonline import REDACTED, Secrets, to_line
from furlong.secretvalues import secrets_in


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("MLFLOW_AUTHORIZATION", "Bearer abcDEF123", "abcDEF123"),
        ("HTTP_AUTHORIZATION", "dXNlcjpwYXNz", "dXNlcjpwYXNz"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "x-team=infra,authorization=Bearer%20abc.DEF", "abc.DEF"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "api-key=plainword,x=y", "plainword"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "x-honeycomb=0123456789abcdefXYZ", "0123456789abcdefXYZ"),
        ("EXTRA_HEADERS", "X-Api-Key: s3cret/value=", "s3cret/value="),
        ("FURLONG_SLACK_WEBHOOK_URL", "https://hooks.slack.com/services/T0/B0/XyZ123", "/services/T0/B0/XyZ123"),
        ("ALERT_WEBHOOK_URL", "https://me:open-sesame@h.example/x", "open-sesame"),
        ("SENTRY_DSN", "https://0123456789abcdef@o1.ingest.example/42", "0123456789abcdef"),
        ("PG_DSN", "postgresql://me:p%40ssword1@db/x", "p@ssword1"),
        ("PG_DSN", "host=db user=me password=Tr0ub4dor dbname=x", "Tr0ub4dor"),
        ("SERVICE_CREDENTIALS", "me:open-sesame", "open-sesame"),
        ("MLFLOW_TRACKING_URI", "https://me:open-sesame@mlflow.example", "open-sesame"),
        ("https_proxy", "http://me:open-sesame@proxy:3128", "open-sesame"),
    ],
)
def test_secret_is_in_no_line(name: str, value: str, secret: str) -> None:
    line = to_line({"event": f"tried with {secret} in {value}"}, secrets=Secrets.from_environment({name: value}))
    assert secret.encode() not in line and REDACTED.encode() in line


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_EXPORTER_OTLP_HEADERS", "content-type=application/json,accept-encoding=gzip, deflate,region=us-east-1"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer short"),
        ("WEBHOOK_URL", "http://localhost:9000"),
        ("MLFLOW_DSN", "sqlite:///mlflow.db"),
        ("GOOGLE_APPLICATION_CREDENTIALS", "/home/me/google.json"),
        ("MLFLOW_TRACKING_URI", "http://mlflow.example:5000/path"),
        ("MONKEY", "banana split"),
    ],
)
def test_what_is_no_secret_stays_legible(name: str, value: str) -> None:
    assert secrets_in({name: value}) in ([], ["Bearer short"])
    for text in ("application/json", "gzip", "us-east-1", "localhost:9000", "short", "Bearer"):
        assert text in Secrets.from_environment({name: value}).redact(text)


def test_secrets_are_read_from_files_too(tmp_path: Path) -> None:
    (tmp_path / "url").write_text("https://hooks.slack.com/services/T0/B0/XyZ123\n")
    assert "/services/T0/B0/XyZ123" in secrets_in({"SLACK_WEBHOOK_URL_FILE": str(tmp_path / "url")})
    assert secrets_in({"SOME_TOKEN_FILE": str(tmp_path / "none"), "X_TOKEN_FILE": "\0"}) == []
