"""A log function of a user's: it keeps the samples of each evaluation as the run got them."""

import json
from pathlib import Path
from typing import Any


def keep(rollout_id: int, args: Any, data: dict[str, Any], extra: dict[str, float]) -> bool:
    """Write them to a file of the run directory; the default values are logged all the same."""
    kept = [
        {
            "tokens": sample.tokens,
            "response_length": sample.response_length,
            "log_probs": sample.rollout_log_probs,
            "versions": sample.weight_versions,
        }
        for evaluated in data.values()
        for sample in evaluated["samples"]
    ]
    Path(args.run_dir, f"eval_samples_{rollout_id}.json").write_text(json.dumps(kept))
    return False
