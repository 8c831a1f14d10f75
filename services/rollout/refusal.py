"""The error that a call is answered with: a status and words. Raised anywhere below the servicer."""

import grpc


class Refused(Exception):
    """A call cannot be done."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        self.code = code
        super().__init__(message)
