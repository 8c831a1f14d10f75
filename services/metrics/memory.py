"""Has the C library give large freed blocks back to the system at once, so that a burst of large batches does not leave
the process large. Only this process's memory; where the library is another one, nothing is done.
"""

import ctypes

_M_MMAP_THRESHOLD = -3
_LARGE_BYTES = 1024 * 1024


def give_large_blocks_back() -> bool:
    """Call once, at the start. Whether the library does it."""
    try:
        return bool(ctypes.CDLL("libc.so.6").mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES))
    except (OSError, AttributeError):  # another C library
        return False
