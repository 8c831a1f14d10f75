"""What Schemathesis must know to make good requests. Loaded by it, by name; not a test.

A worker's address is a format of our own: addresses of this machine, each used once, at all of which the one worker of
the test listens.
"""

import itertools
import os

import schemathesis
from hypothesis import strategies

_numbers = itertools.count(1)


def _address() -> str:
    number = next(_numbers)
    return f"http://127.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}:{os.environ['WORKER_PORT']}"


schemathesis.openapi.format("worker-url", strategies.builds(_address))
