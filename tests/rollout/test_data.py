"""Prompts, seeds, feed: what a bad line says, what is left out, what order the prompts come in."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from furlong.config import ConfigError
from services.rollout.feed import FeedPosition, PromptFeed
from services.rollout.prompts import PromptSet, PromptSource, load_prompts
from services.rollout.seeds import SeedScope, epoch_order
from services.rollout.tokenizer import ModelLimits, load_tokenizer, read_model_limits
from tests.rollout.world import make_config, write_lines


def load(tmp_path: Path, items: list[object], **rollout: Any) -> PromptSet:
    config = make_config(tmp_path, **rollout)
    path = write_lines(tmp_path / "own.jsonl", items)
    source = PromptSource.of(config, str(path), key="rollout.prompt_data", limits=ModelLimits(16, 64))
    return load_prompts(source, load_tokenizer(config))


def test_blank_lines_are_skipped_and_lines_keep_their_number(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    path = tmp_path / "own.jsonl"
    path.write_text('\n{"prompt": "ab", "label": 7, "metadata": {"k": 1}}\n   \n{"prompt": "b", "label": "x"}')
    source = PromptSource.of(config, str(path), key="rollout.prompt_data", limits=ModelLimits(16, 64))
    first, second = load_prompts(source, load_tokenizer(config)).prompts
    assert (first.index, first.label, first.label_text, first.metadata) == (1, 7, "7", {"k": 1})
    assert (second.index, list(second.token_ids)) == (3, [1])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "own.jsonl:2"),
        ("[1]", "must be a JSON object, got list"),
        ('{"question": "a", "label": "b"}', "key 'prompt' is missing. Its keys: 'question', 'label'"),
        ('{"prompt": 3, "label": "b"}', "key 'prompt' must be a non-empty string, got int"),
        ('{"prompt": [{"role": "user"}], "label": "b"}', "--apply-chat-template"),
        ('{"prompt": "a"}', "key 'label' is missing"),
        ('{"prompt": "a", "label": "b", "metadata": 3}', "key 'metadata' must be an object"),
        ("\udcff", "own.jsonl:2"),
        ('{"prompt": "a\\ud83d", "label": "b"}', "got the lone surrogate \\ud83d"),
        ('{"prompt": "a", "label": "\\udead"}', "got the lone surrogate \\udead"),
        ('{"prompt": "a", "label": ' + "[" * 100_000, "recursion"),
    ],
)
def test_a_bad_line_names_file_line_and_key(tmp_path: Path, line: str, words: str) -> None:
    config = make_config(tmp_path)
    path = tmp_path / "own.jsonl"
    path.write_bytes(b'{"prompt": "a", "label": "b"}\n' + line.encode(errors="surrogateescape") + b"\n")
    source = PromptSource.of(config, str(path), key="rollout.prompt_data", limits=ModelLimits(16, 64))
    with pytest.raises(ConfigError) as caught:
        load_prompts(source, load_tokenizer(config))
    assert words in str(caught.value)
    assert "own.jsonl:2" in str(caught.value)


def test_a_missing_file_names_the_key(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    source = PromptSource.of(config, "no-such.jsonl", key="rollout.prompt_data", limits=ModelLimits(16, 64))
    with pytest.raises(ConfigError, match=r"rollout.prompt_data = 'no-such.jsonl'"):
        load_prompts(source, load_tokenizer(config))


def test_too_long_prompts_are_left_out_and_counted(tmp_path: Path) -> None:
    items: list[object] = [{"prompt": "a" * n, "label": "b"} for n in (3, 5, 4)]
    loaded = load(tmp_path, items, rollout_max_prompt_len=4)
    assert ([len(p.token_ids) for p in loaded.prompts], loaded.num_too_long) == ([3, 4], 1)
    by_context = load(tmp_path, [{"prompt": "a" * n, "label": "b"} for n in (56, 57)])  # 64 - 8 for the response
    assert [len(p.token_ids) for p in by_context.prompts] == [56]
    with pytest.raises(ConfigError, match="no usable prompt"):
        load(tmp_path, items, rollout_max_prompt_len=1)


def test_a_response_that_fills_the_context_is_refused(tmp_path: Path) -> None:
    config = make_config(tmp_path, rollout_max_response_len=64)
    limits = read_model_limits(Path(config.model.hf_checkpoint))
    with pytest.raises(ConfigError, match="rollout_max_response_len"):
        PromptSource.of(config, "x", key="rollout.prompt_data", limits=limits)


def test_chat_prompts_are_rendered_by_the_models_template(tmp_path: Path) -> None:
    config = make_config(tmp_path, apply_chat_template=True)
    model = Path(config.model.hf_checkpoint)
    template = "{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    template += "{% if add_generation_prompt %}d{% endif %}"
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": {"content": "b"}}))
    path = write_lines(
        tmp_path / "own.jsonl",
        [{"prompt": "aa", "label": "x"}, {"prompt": [{"role": "user", "content": "c"}], "label": "x"}],
    )
    source = PromptSource.of(config, str(path), key="rollout.prompt_data", limits=ModelLimits(16, 64))
    assert [p.text for p in load_prompts(source, load_tokenizer(config)).prompts] == ["aabd", "cbd"]


def feed_of(tmp_path: Path, letters: str = "abcde", *, shuffle: bool = True) -> PromptFeed:
    prompts = load(tmp_path, [{"prompt": c, "label": c} for c in letters])
    return PromptFeed(prompts, run_seed=7, shuffle=shuffle)


def test_an_epoch_goes_through_every_prompt_once_and_the_next_is_shuffled_anew(tmp_path: Path) -> None:
    feed = feed_of(tmp_path, "abcdefghij")
    draws, position = feed.draw(feed.start(), 20)
    lines = [draw.prompt.index for draw in draws]
    assert sorted(lines[:10]) == sorted(lines[10:]) == list(range(10))
    assert lines[:10] != lines[10:]
    assert [draw.epoch for draw in draws] == [0] * 10 + [1] * 10
    assert (position.epoch, position.offset, position.num_groups) == (1, 10, 20)


def test_a_set_smaller_than_a_batch_wraps_over_epochs(tmp_path: Path) -> None:
    feed = feed_of(tmp_path, "ab", shuffle=False)
    draws, _ = feed.draw(feed.start(), 5)
    assert [(d.group_index, d.epoch, d.prompt.index) for d in draws] == [
        (0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1), (4, 2, 0),
    ]  # fmt: skip


def test_going_on_from_a_position_is_the_same_as_never_stopping(tmp_path: Path) -> None:
    feed = feed_of(tmp_path)
    whole, _ = feed.draw(feed.start(), 12)
    first, position = feed.draw(feed.start(), 7)
    rest, _ = feed_of(tmp_path).draw(position, 5)
    assert [*first, *rest] == whole


def test_a_smaller_new_data_set_starts_at_its_beginning_with_a_warning(tmp_path: Path) -> None:
    feed = feed_of(tmp_path, "abcd")
    saved = FeedPosition("of another set", epoch=0, offset=50, num_groups=50)
    position, warning = feed.adopt(saved)
    assert (position.epoch, position.offset, position.num_groups) == (0, 0, 50)
    assert "starting at the beginning of the new set of 4 prompts" in warning
    assert [d.group_index for d in feed.draw(position, 2)[0]] == [50, 51]
    assert feed.adopt(replace(saved, fingerprint=feed.start().fingerprint))[1] == ""


def test_the_fingerprint_follows_labels_and_metadata(tmp_path: Path) -> None:
    prints = {
        load(tmp_path, [{"prompt": "a", "label": label, "metadata": metadata}]).fingerprint
        for label in ("x", "y")
        for metadata in ({}, {"k": 1})
    }
    assert len(prints) == 4


def test_seeds_are_pinned_and_differ_in_every_id() -> None:
    scope = SeedScope(1234)
    seed = scope.sampling_seed(rollout_id=3, group_index=5, sample_index=1)
    documented = hashlib.blake2b(b"furlong.sampling.1|train|1234|3|5|1|0", digest_size=16).digest()
    assert seed == int.from_bytes(documented[:4], "big") & 0x7FFFFFFF == 503812620
    others = {
        scope.sampling_seed(rollout_id=4, group_index=5, sample_index=1),
        scope.sampling_seed(rollout_id=3, group_index=6, sample_index=1),
        scope.sampling_seed(rollout_id=3, group_index=5, sample_index=2),
        scope.sampling_seed(rollout_id=3, group_index=5, sample_index=1, retry=1),
        SeedScope(1235).sampling_seed(rollout_id=3, group_index=5, sample_index=1),
        SeedScope(1234, "eval/x").sampling_seed(rollout_id=3, group_index=5, sample_index=1),
    }
    assert len(others | {seed}) == 7
    assert all(0 <= one < 2**31 for one in others)


def test_the_order_of_an_epoch_depends_on_seed_and_epoch_only() -> None:
    assert epoch_order(7, 2, 8, shuffle=True) == epoch_order(7, 2, 8, shuffle=True)
    assert epoch_order(7, 2, 8, shuffle=True) != epoch_order(7, 3, 8, shuffle=True)
    assert epoch_order(7, 2, 3, shuffle=False) == [0, 1, 2]
