"""Worker addresses have one normal form, and what cannot be a worker is refused."""

import pytest

from services.router.workers.urls import BadUrl, parse_worker_url, refused_address


@pytest.mark.parametrize(
    ("given", "normal"),
    [
        ("http://127.0.0.1:30000", "http://127.0.0.1:30000"),
        ("http://127.0.0.1:30000/", "http://127.0.0.1:30000"),
        ("HTTP://Engine-1.Example:80", "http://engine-1.example"),
        ("https://engine.example.:443/", "https://engine.example"),
        ("https://engine.example:80", "https://engine.example:80"),
        ("http://[::1]:30000", "http://[::1]:30000"),
        ("http://[0:0:0:0:0:0:0:1]:80/", "http://[::1]"),
    ],
)
def test_one_worker_has_one_address(given: str, normal: str) -> None:
    assert str(parse_worker_url(given)) == normal


@pytest.mark.parametrize(
    "given",
    [
        "",
        "127.0.0.1:30000",
        "file:///etc/passwd",
        "ftp://host/",
        "gopher://host:70/",
        "http://",
        "http:///path",
        "http://:30000",
        "http://host:0",
        "http://host:65536",
        "http://host:abc",
        "http://host/path",
        "http://host?x=1",
        "http://host#x",
        "http://ho st/",
        "http://host\r\nx: y/",
        "http://host\\@evil/",
        "http://höst/",
        "http://169.254.169.254/",
        "http://[fe80::1]:80",
        "http://[::ffff:169.254.169.254]/",
        "http://[64:ff9b::a9fe:a9fe]/",
        "http://[2002:a9fe:a9fe::]/",
        "http://0.0.0.0:30000",
        "http://[::]:30000",
        "http://224.0.0.1",
        "http://255.255.255.255",
        "http://2852039166/",
        "http://0x7f.1/",
        "http://127.1/",
        "http://[::1",
        "http://" + "a" * 3000,
        "http://" + "a" * 64 + ".example",
        "http://" + "a." * 127 + "example",
        "http://a..b:80",
        "http://.localhost:80",
        None,
        7,
        ["http://host"],
        {"a": 1},
    ],
)
def test_what_cannot_be_a_worker_is_refused(given: object) -> None:
    with pytest.raises(BadUrl):
        parse_worker_url(given)


def test_credentials_are_refused_and_not_repeated() -> None:
    with pytest.raises(BadUrl, match="no user name or password") as caught:
        parse_worker_url("http://user:hunter2@host:1")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("allowed", ["10.0.0.0/8", "10.1.2.3", "10.1.2.3:30000"])
def test_an_allowed_worker_is_taken(allowed: str) -> None:
    assert parse_worker_url("http://10.1.2.3:30000", allowed=[allowed]).host == "10.1.2.3"


@pytest.mark.parametrize("allowed", ["10.0.0.0/16", "10.1.2.4", "10.1.2.3:30001", "engine"])
def test_a_worker_outside_the_allow_list_is_refused(allowed: str) -> None:
    with pytest.raises(BadUrl, match="--router-worker-allow"):
        parse_worker_url("http://10.1.2.3:30000", allowed=[allowed])


def test_a_name_that_led_to_a_metadata_service_is_known_by_its_address() -> None:
    assert "link-local" in refused_address("169.254.169.254")
    assert "link-local" in refused_address("fe80::1%eth0")
    assert refused_address("127.0.0.1") == ""
