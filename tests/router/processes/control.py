"""The processes of a router that runs in this one."""

import psutil

from services.router.processes.child import PROGRAM


def child_pids(parent: int | None = None) -> list[int]:
    """Secondaries that live."""
    found: list[int] = []
    for child in psutil.Process(parent).children():
        try:
            if PROGRAM in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child.pid)
        except psutil.NoSuchProcess:
            continue
    return found
