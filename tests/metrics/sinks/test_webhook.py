"""Rows by POST: each arrives, a bad one alone is left out, and no secret of the URL is told."""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from services.metrics.rows import Row, RowReader
from services.metrics.sinks import webhook
from services.metrics.sinks.post import Poster, retry_after_s, shown
from services.metrics.sinks.sink import Cursor
from tests.metrics.running import MetricsProcess, batch, part, send, until
from tests.metrics.sinks.receiver import Receiver, Reply, Request, receiving

Make = Callable[..., MetricsProcess]


def post_rows(service: MetricsProcess, count: int, *, first: int = 1) -> None:
    send(service, batch([part(n, {"train/loss": ["last", n]}) for n in range(first, first + count)], first=first))


def rows_in(request: Request) -> list[dict[str, object]]:
    return json.loads(request.body)["rows"]


def steps_at(receiver: Receiver) -> list[object]:
    return [row["step"] for request in receiver.taken for row in rows_in(request)]


def sink_of(service: MetricsProcess, name: str = "webhook") -> object:
    return next(sink for sink in service.status().sinks if sink.name == name)


def test_rows_arrive_as_they_are_once_and_in_order(make: Make) -> None:
    with receiving() as receiver:
        service = make(metrics_webhook=f"{receiver.url}/in").start()
        post_rows(service, 600)
        until(lambda: len(steps_at(receiver)) >= 600, "600 rows")
        service.stop()
        assert steps_at(receiver) == list(range(1, 601))
        first = rows_in(receiver.taken[0])[0]
        assert (first["row"], first["run"], first["axis"], first["values"]) == (1, "r", "train/step", {"train/loss": 1})
        assert len({request.headers["idempotency-key"] for request in receiver.taken}) == len(receiver.taken)


def test_what_was_taken_of_a_parted_write_is_not_sent_again_when_the_rest_fails(make: Make) -> None:
    """The first half is taken, the second is not at once: it comes again as it was, and only it."""
    failed: list[Request] = []

    def answer(request: Request) -> Reply:
        if len(rows_in(request)) > 8:
            return Reply(413)
        if not failed and receiver.taken:
            failed.append(request)
            return Reply(503)
        return Reply()

    with receiving(answer) as receiver:
        service = make(metrics_webhook=receiver.url).start()
        post_rows(service, 100)
        until(lambda: len(set(map(str, steps_at(receiver)))) >= 100, "100 rows")
        service.stop()
        assert steps_at(receiver) == list(range(1, 101))
        again = next(request for request in receiver.taken if request.body == failed[0].body)
        assert again.headers["idempotency-key"] == failed[0].headers["idempotency-key"]


@pytest.mark.parametrize("away_s", [1.5, pytest.param(20.0, marks=pytest.mark.slow)])
def test_receiver_that_is_away_for_a_while_gets_every_row_once_it_is_back(make: Make, away_s: float) -> None:
    begun: list[float] = []

    def answer(request: Request) -> Reply:
        begun.append(time.monotonic())
        return Reply(503, {"Retry-After": "1"}) if begun[-1] - begun[0] < away_s else Reply()

    with receiving(answer) as receiver:
        service = make(metrics_webhook=receiver.url).start()
        post_rows(service, 100)
        assert len(service.wait_rows(100)) == 100  # another sink does not wait
        until(lambda: len(steps_at(receiver)) >= 100, "100 rows", limit_s=60)
        assert steps_at(receiver) == list(range(1, 101))
        keys = [request.headers["idempotency-key"] for request in receiver.requests]
        assert keys[0] == keys[1]  # the same rows under the same key


def test_one_bad_row_of_a_hundred_is_left_out_and_counted(make: Make) -> None:
    def answer(request: Request) -> Reply:
        return Reply(400, body=b"no 37") if any(row["step"] == 37 for row in rows_in(request)) else Reply()

    with receiving(answer) as receiver:
        service = make(metrics_webhook=receiver.url).start()
        post_rows(service, 100)
        until(lambda: len(steps_at(receiver)) >= 99, "99 rows")
        post_rows(service, 1, first=101)
        until(lambda: len(steps_at(receiver)) >= 100, "the next row")
        assert sorted(map(int, map(str, steps_at(receiver)))) == [n for n in range(1, 102) if n != 37]
        assert sink_of(service).num_rows_refused == 1  # type: ignore[attr-defined]
        assert len(service.rows()) == 101
        assert '"reason":"' in service.run_dir.log("metrics").read_text().replace('": "', '":"')


def test_receiver_that_refuses_everything_costs_no_row(make: Make) -> None:
    refusing = [True]
    with receiving(lambda request: Reply(400 if refusing[0] else 200)) as receiver:
        service = make(metrics_webhook=receiver.url).start()
        post_rows(service, 5)
        until(lambda: sink_of(service).state == "failing", "failing")  # type: ignore[attr-defined]
        refusing.clear()
        refusing.append(False)
        until(lambda: len(steps_at(receiver)) >= 5, "five rows")
        assert sink_of(service).num_rows_refused == 0  # type: ignore[attr-defined]


def test_redirect_is_not_followed_and_secrets_of_the_url_are_not_told(make: Make) -> None:
    with receiving(lambda request: Reply(307, {"Location": "/elsewhere"}, b"not HUSHHUSH")) as receiver:
        url = receiver.url.replace("//", "//user:HUSHHUSH@") + "/hook/HUSHHUSHHUSHHUSH?token=HUSHHUSH"
        service = make(metrics_webhook=url).start()
        post_rows(service, 1)
        until(lambda: sink_of(service).state == "failing", "failing")  # type: ignore[attr-defined]
        assert "redirects are not followed" in sink_of(service).last_error  # type: ignore[attr-defined]
        service.stop()
        assert {request.path for request in receiver.requests} == {"/hook/HUSHHUSHHUSHHUSH?token=HUSHHUSH"}
        assert "HUSH" not in service.run_dir.log("metrics").read_text()
        assert "HUSH" not in (service.run_dir.root / "stderr").read_text()


def test_proxy_of_the_environment_is_not_asked_for_this_machine(make: Make) -> None:
    with receiving() as receiver, receiving() as proxy:
        service = make(metrics_webhook=receiver.url, environment={"http_proxy": proxy.url, "no_proxy": ""}).start()
        post_rows(service, 1)
        until(lambda: steps_at(receiver), "a row")
        assert proxy.requests == []


def test_receiver_killed_with_its_answer_under_way_gets_the_same_key_again(make: Make) -> None:
    """The service dies between the POST and its memory of it."""
    with receiving() as receiver:
        service = make(metrics_webhook=receiver.url).start()
        receiver.answer = lambda request: (service.kill(), Reply())[1]
        with contextlib.suppress(grpc.RpcError):  # the POST may come before the acknowledgement
            post_rows(service, 3)
        until(lambda: len(receiver.taken) >= 1, "a POST")
        receiver.answer = lambda request: Reply()
        service.start()
        post_rows(service, 3)  # known already, or not
        post_rows(service, 2, first=4)
        until(lambda: len(set(map(str, steps_at(receiver)))) >= 5, "all rows")
        keys = [request.headers["idempotency-key"] for request in receiver.taken]
        by_key = dict(zip(keys, receiver.taken, strict=True))
        assert [row["step"] for request in by_key.values() for row in rows_in(request)] == [1, 2, 3, 4, 5]
        assert len(keys) > len(by_key)


def test_what_was_taken_of_a_parted_write_is_not_sent_again_after_a_kill_in_its_middle(make: Make) -> None:
    def answer(request: Request) -> Reply:
        if len(rows_in(request)) > 8:
            return Reply(413)
        if len(receiver.taken) == 1:  # nothing of this write stands in the store
            service.kill()
        return Reply()

    with receiving(answer) as receiver:
        service = make(metrics_webhook=receiver.url).start()
        post_rows(service, 16)
        until(lambda: len(receiver.taken) == 2, "both halves")
        service.start()
        until(lambda: len(receiver.taken) > 2, "the half whose answer was lost")
        service.stop()
        assert steps_at(receiver) == [*range(1, 17), *range(9, 17)]
        assert len({request.headers["idempotency-key"] for request in receiver.taken}) == 2


async def test_disk_is_waited_for_outside_the_event_loop_and_once_a_post(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda handle: synced.append(threading.get_ident()))
    with receiving() as receiver:
        poster = Poster(receiver.url)
        sink = webhook.WebhookSink(poster, folder=tmp_path / "sink", reader=RowReader(tmp_path / "none.db"))
        await sink.start(Cursor(0))
        num_at_start = len(synced)
        await sink.write([Row(1, "r", b'{"step":1}', None, True, 0)])
        await sink.finish()
    assert len(receiver.taken) == len(synced) - num_at_start == 1
    assert threading.get_ident() not in synced


def test_retry_after_is_read_in_both_forms() -> None:
    assert retry_after_s("7") == 7
    assert retry_after_s("Sun, 06 Nov 1994 08:49:37 GMT", now=784111757) == 20
    assert [retry_after_s(text) for text in ("", "soon", "-3", "nan")] == [0, 0, 0, 0]
    assert retry_after_s("86400") == 300


def test_only_the_place_of_a_url_is_shown() -> None:
    assert shown("https://u:p@host:99/a/b?c=d") == "https://host:99"


@pytest.mark.slow
def test_rows_whose_answer_was_lost_come_again_under_their_key_after_a_kill(make: Make) -> None:
    answers = [Reply(), *[Reply(500)] * 30]
    with receiving(lambda request: answers.pop(0) if answers else Reply()) as receiver:
        service = make(metrics_webhook=receiver.url).start()
        post_rows(service, 1)
        until(lambda: receiver.taken, "the first row")
        post_rows(service, 600, first=2)
        until(lambda: any(len(rows_in(request)) > 16 for request in receiver.requests), "a large POST", limit_s=30)
        lost = receiver.requests[-1]
        service.kill()
        answers.clear()
        service.start()
        until(lambda: len(steps_at(receiver)) >= 601, "all rows")
        again = receiver.taken[1]
        assert again.headers["idempotency-key"] == lost.headers["idempotency-key"]
        assert (again.body, steps_at(receiver)) == (lost.body, list(range(1, 602)))


@pytest.mark.slow
def test_refused_rows_that_come_first_after_a_restart_hold_up_none_behind_them(make: Make) -> None:
    with receiving(lambda request: Reply(413) if b'"train/huge"' in request.body else Reply()) as receiver:
        service = make(metrics_webhook=receiver.url).start()
        huge: dict[str, object] = {f"train/{'k' * 200}{n}": ["last", n] for n in range(10_000)}
        huge["train/huge"] = ["last", 1]
        send(service, batch([part(1, huge), part(2, huge), part(3, {"train/loss": ["last", 3]})]))
        until(lambda: steps_at(receiver) == [3], "the row behind those that are refused")
        until(lambda: sink_of(service).num_rows_refused == 2, "two rows counted")  # type: ignore[attr-defined]


def test_identity_that_a_full_disk_left_empty_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / "identity").touch()
    assert len(webhook._identity(tmp_path / "identity")) == 16
