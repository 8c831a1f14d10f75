"""The distributions and the table of samples of a rollout."""

from furlong.records import Histogram, encode_value
from furlong.v1 import sample_pb2
from services.rollout.metrics import Incidents, RolloutTimes, rollout_values
from services.rollout.sample_table import MAX_CHARS, sample_table
from services.rollout.sample_view import Sample

TIMES = RolloutTimes(rollout_s=2.0, reward_s=0.5, wait_s=0.25, num_devices=2)


def spread(rewards: list[float | None]) -> dict[str, object]:
    samples = [sample_pb2.Sample(response_token_ids=[3] * (n + 1), reward=r) for n, r in enumerate(rewards)]
    return rollout_values(  # type: ignore[return-value]
        [sample_pb2.Group(samples=samples)],
        incidents=Incidents(),
        times=TIMES,
        group_size=4,
        std_normalization=True,
        passrate=False,
    )


def test_spread_of_rewards_and_lengths_holds_each_sample_once() -> None:
    values = spread([0.0, 1.0, 1.0, None])
    rewards, lengths = values["rollout/reward_histogram"], values["rollout/response_len_histogram"]
    assert isinstance(rewards, Histogram) and isinstance(lengths, Histogram)
    assert (rewards.edges[0], rewards.edges[-1], rewards.counts[0], rewards.counts[-1]) == (0.0, 1.0, 1, 2)
    assert (lengths.edges[0], lengths.edges[-1], sum(lengths.counts)) == (1, 4, 4)


def test_rollout_without_rewards_has_no_spread_of_them() -> None:
    assert "rollout/reward_histogram" not in spread([None, None])


def view(index: int, response: str) -> Sample:
    return Sample(index, 0, "2+2=", [1], response, 1, label={"answer": 4}, reward=0.5, sample_index=index)


def test_table_shows_the_first_samples_and_the_beginning_of_long_texts() -> None:
    table = sample_table((view(n, "4" * (MAX_CHARS + 7)) for n in range(5)), num_rows=2)
    assert table.columns == ("group_index", "sample_index", "prompt", "response", "reward", "label", "status")
    assert [row[:3] for row in table.rows] == [(0, 0, "2+2="), (0, 1, "2+2=")]
    assert table.rows[0][3] == "4" * MAX_CHARS + "...[7 more characters]"
    assert table.rows[0][4:] == (0.5, "{'answer': 4}", "pending")


def test_table_of_text_that_utf8_cannot_hold_is_sent_all_the_same() -> None:
    kind, _, rows = encode_value(sample_table([view(0, "a\ud800b")], num_rows=8))
    assert kind == "table" and rows[0][3] == "a?b"
