"""What a run refuses of its router's section."""

from pathlib import Path

import pytest

from furlong.config import ConfigError
from tests.launch.runs import read, small_run


def refused(root: Path, *flags: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(small_run(root), *flags)
    return str(caught.value)


def test_off_loopback_only_with_a_token(tmp_path: Path) -> None:
    assert "--router-token-file" in refused(tmp_path, "--router-host", "0.0.0.0")
    path = tmp_path / "run.toml"
    config = read(path, "--router-host", "0.0.0.0", "--router-token-file", "token")
    assert (config.router.router_host, config.run.host) == ("0.0.0.0", "127.0.0.1")


def test_other_services_stay_on_loopback(tmp_path: Path) -> None:
    said = refused(tmp_path, "--host", "0.0.0.0", "--router-token-file", "token")
    assert "run.host" in said and len(said.splitlines()) == 1


def test_a_router_elsewhere_is_not_ours_to_judge(tmp_path: Path) -> None:
    address = "https://router.example:443,router.example:30001"
    config = read(small_run(tmp_path), "--router-addr", address, "--router-tls-cert", "ca.pem")
    assert config.router.router_addr == address


@pytest.mark.parametrize("address", ["http://h:1", "h:1,h:2", "http://h:1,h", "http://h:1/x,h:2"])
def test_both_addresses_of_a_router_elsewhere(tmp_path: Path, address: str) -> None:
    assert "must name both addresses" in refused(tmp_path, "--router-addr", address)


def test_policy_versions_are_needed_in_a_run(tmp_path: Path) -> None:
    assert read(small_run(tmp_path)).router.router_require_policy_version
