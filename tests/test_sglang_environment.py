"""Which SGLang the tests take."""

import sys
from pathlib import Path

import pytest

from tests import sglang_environment
from tests.sglang_environment import LAUNCHER, SglangEnvironment, find_sglang


def test_the_one_that_make_made_is_taken_once_it_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_environment, "MADE", tmp_path)
    assert find_sglang({}) is None
    (tmp_path / ".ready").touch()
    assert find_sglang({}) == SglangEnvironment(f"{tmp_path}/bin/python", str(LAUNCHER))


def test_the_environment_names_another(tmp_path: Path) -> None:
    named = {"FURLONG_TEST_SGLANG_PYTHON": sys.executable}
    assert find_sglang(named) == SglangEnvironment(sys.executable, str(LAUNCHER))
    assert find_sglang({**named, "FURLONG_TEST_SGLANG_LAUNCHER": ""}) == SglangEnvironment(sys.executable, "")


def test_a_named_one_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="make sglang"):
        find_sglang({"FURLONG_TEST_SGLANG_PYTHON": str(tmp_path / "python")})
