"""Sinks made from flags."""

import pytest

from furlong.config import ConfigError, RunConfig
from services.metrics.sinks.flags import specs_of


@pytest.mark.parametrize("field", ["metrics_webhook", "otlp_endpoint"])
def test_file_of_a_url_that_went_after_the_start_was_checked_is_named(field: str) -> None:
    config = RunConfig.model_validate({"metrics": {field: "@/no/such/file"}})
    with pytest.raises(ConfigError, match=rf"metrics\.{field} = '@/no/such/file': .*No such file"):
        specs_of(config, {})
