"""A secondary starts here: with descriptors from the primary, never by hand.

It does not heed SIGTERM or SIGINT, which a terminal or an init system sends to all processes of a group: the primary
tells it when to stop, and it dies with the primary.
"""

import os
import signal
import socket
import sys

from furlong.process import die_with_parent
from services.router.processes.frames import read_frame
from services.router.processes.handdown import Descriptors

HELLO_TIMEOUT_S = 10.0


def main(arguments: list[str]) -> None:
    """Pass requests on until told to stop. arguments: the primary's process id, the descriptors."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    parent_pid, descriptors = int(arguments[0]), Descriptors.of(arguments[1])
    die_with_parent(parent_pid)
    link = socket.socket(fileno=descriptors.link)
    hello = read_frame(link, timeout_s=HELLO_TIMEOUT_S)
    from services.router.processes.passing import (
        run,
    )  # the rest takes longer to import than to see that nobody is there

    run(hello, link, descriptors)
    os._exit(0)  # nothing that a library may have left running keeps a process of a router that stopped


if __name__ == "__main__":
    main(sys.argv[1:])
