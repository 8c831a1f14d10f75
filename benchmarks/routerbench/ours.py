"""Starts Furlong's router for the benchmark: `python -m benchmarks.routerbench.ours PORT NUM_PROCESSES WORKER_URL...`

Everything that is on by default is on. A run directory stands in for one, so that this works with any version of it.
"""

import sys
import tempfile

from furlong.config import RunConfig


def main() -> int:
    """Until SIGTERM."""
    from services.router.main import main as serve

    port, num_processes, *urls = sys.argv[1:]
    router = {
        "router_port": int(port),
        "router_processes": int(num_processes),
        "router_worker_urls": urls,
        "router_require_policy_version": False,
    }
    with tempfile.TemporaryDirectory() as folder:
        config = RunConfig.model_validate({"run": {"run_dir": folder, "drain_budget_s": 1.0}, "router": router})
        return serve(config, rank=0, foreground=False)


if __name__ == "__main__":
    sys.exit(main())
