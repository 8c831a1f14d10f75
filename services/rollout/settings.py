"""A fingerprint of the settings that shape samples: kept batches are given again only under the same ones. Pure."""

import orjson

from furlong.checksum import bytes_checksum
from furlong.config import RunConfig

_SECTIONS = ("run", "model", "trainer", "rollout")

_WITHOUT_EFFECT = frozenset(
    {
        "call_timeout_s",
        "custom_eval_rollout_log_function_path",
        "custom_rollout_log_function_path",
        "distributed_timeout_s",
        "drain_budget_s",
        "engine_num_threads",
        "eval_interval",
        "eval_prompt_data",
        "host",
        "keep_checkpoints",
        "log_format",
        "log_hook_timeout_s",
        "log_level",
        "log_passrate",
        "log_reward_category",
        "log_samples",
        "name",
        "num_rollout",
        "profile_ranks",
        "rm_num_workers",
        "rollout_addr",
        "rollout_max_in_flight",
        "rollout_num_engines",
        "rollout_num_gpus",
        "rollout_request_timeout_s",
        "run_dir",
        "save_interval",
        "sglang_launcher",
        "sglang_python",
        "start_timeout_s",
        "update_weight_buffer_size",
        "update_weight_timeout_s",
    }
)


def settings_fingerprint(config: RunConfig) -> str:
    """Changes when a setting changes that samples depend on, directly or by the weights."""
    tree = config.model_dump(mode="json", include=set(_SECTIONS))
    kept = {
        section: {name: value for name, value in fields.items() if name not in _WITHOUT_EFFECT}
        for section, fields in tree.items()
    }
    return bytes_checksum(orjson.dumps(kept, option=orjson.OPT_SORT_KEYS))
