"""Where the example lies."""

from pathlib import Path

import pytest

ARITHMETIC = Path(__file__).resolve().parents[2] / "examples" / "arithmetic"


@pytest.fixture(scope="session")
def arithmetic() -> Path:
    """The folder of the example."""
    return ARITHMETIC
