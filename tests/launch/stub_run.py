"""A supervised run of stub services, as a process of its own: `stub_run.py RUN_DIR JSON`."""

import json
import os
import sys
from pathlib import Path

from furlong.launch.console import Console
from furlong.launch.descendants import adopt_orphans
from furlong.launch.lock import RunLock
from furlong.launch.plan import ChildPlan
from furlong.launch.supervisor import Limits, Supervisor
from furlong.rundir import RunDir

STUB = Path(__file__).with_name("stub_service.py")


def main(run_dir: RunDir, stubs: dict[str, list[str]], limits: Limits) -> int:
    plans = []
    for instance, arguments in stubs.items():
        service = instance.partition("-")[0]
        place = ["--instance", instance, "--run-dir", str(run_dir.root), "--parent-pid", str(os.getpid())]
        command = (sys.executable, str(STUB), *place, *arguments)
        plans.append(ChildPlan(instance, service, command, os.environ, relayed=instance == "trainer-0"))
    output = Console(1)
    adopt_orphans()
    with RunLock(run_dir) as lock:
        supervisor = Supervisor(
            plans,
            run_dir=run_dir,
            limits=limits,
            output=output,
            on_started=lock.record,
            on_stopping=lock.record_stopping,
        )
        ending = supervisor.run()
    output.line(f"code {ending.code}")
    output.line(ending.reason)
    output.flush(timeout_s=2.0)
    return ending.code


if __name__ == "__main__":
    given = json.loads(sys.argv[2])
    sys.exit(main(RunDir(Path(sys.argv[1])).create(), given["stubs"], Limits(given["start_s"], given["drain_s"])))
