"""What a process of the router does once it is up, so that requests cost less."""

import gc

NEW_OBJECTS = 20_000
"""The collector looks at young objects after so many more of them; Python's default of 700 comes with each few
requests."""


def settle() -> None:
    """Take what is there by now for permanent, and collect garbage less often: requests make no cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, 20, 20)
