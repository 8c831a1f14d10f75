"""Prompts from a JSON-lines file, tokenised once at load, and what is wrong with a line.

Never repairs a line in silence: a bad one is an error with file, line and key; a prompt that is too long is left out,
counted and logged.
"""

import hashlib
import json
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from furlong.config import ConfigError, RunConfig
from furlong.config.errors import Problem
from services.rollout.tokenizer import BadChat, ModelLimits, Tokenizer

log = structlog.get_logger()

ENCODE_BATCH = 1024


@dataclass(frozen=True)
class Prompt:
    """One prompt of a data set."""

    index: int
    """Its line in the file, counted from 0."""
    text: str
    """As it was tokenised: after the chat template."""
    token_ids: "array[int]"
    label: Any  # Any: whatever JSON value the data has; None: none
    metadata: Mapping[str, Any]  # Any: the user's own

    @property
    def label_text(self) -> str | None:
        """The label as a string, as the wire and the built-in rewards have it."""
        if self.label is None or isinstance(self.label, str):
            return self.label
        return json.dumps(self.label, ensure_ascii=False)


@dataclass(frozen=True)
class PromptSet:
    """A data set, loaded."""

    prompts: tuple[Prompt, ...]
    fingerprint: str
    """Changes when any prompt, its tokens, label or metadata changes."""
    num_too_long: int
    """Prompts that were left out."""


@dataclass(frozen=True)
class PromptSource:
    """Where a data set is, and how to read it."""

    path: Path
    key: str
    """The configuration key that named the file, for errors."""
    input_key: str
    label_key: str
    metadata_key: str
    apply_chat_template: bool
    label_required: bool
    """Built-in rewards need one on every line."""
    max_prompt_len: int | None

    @classmethod
    def of(cls, config: RunConfig, path: str, *, key: str, limits: ModelLimits) -> "PromptSource":
        """A file read as the run says, with prompts that leave room for a response."""
        rollout = config.rollout
        evaluation = key == "rollout.eval_prompt_data"
        response_len = (rollout.eval_max_response_len if evaluation else None) or rollout.rollout_max_response_len
        bounds = [rollout.rollout_max_prompt_len] if rollout.rollout_max_prompt_len else []
        if limits.context_len is not None:
            if limits.context_len <= response_len:
                rule = f"must be below the model's context of {limits.context_len} tokens, to leave room for a prompt"
                name = "eval_max_response_len" if evaluation else "rollout_max_response_len"
                raise ConfigError([Problem(f"rollout.{name}", response_len, rule)])
            bounds.append(limits.context_len - response_len)
        return cls(
            path=Path(path),
            key=key,
            input_key=rollout.input_key,
            label_key=rollout.label_key,
            metadata_key=rollout.metadata_key,
            apply_chat_template=rollout.apply_chat_template,
            label_required=rollout.rm_type is not None,
            max_prompt_len=min(bounds, default=None),
        )


def load_prompts(source: PromptSource, tokenizer: Tokenizer) -> PromptSet:
    """Read and tokenise a file. Raises ConfigError naming file, line and key."""
    drafts = [_draft(source, tokenizer, number, line) for number, line in _lines(source)]
    prompts: list[Prompt] = []
    num_too_long = 0
    for start in range(0, len(drafts), ENCODE_BATCH):
        chunk = drafts[start : start + ENCODE_BATCH]
        encoded = tokenizer.encode_batch(
            [draft.text for draft in chunk], add_special_tokens=not source.apply_chat_template
        )
        for draft, token_ids in zip(chunk, encoded, strict=True):
            if not token_ids:
                raise _problem(source, draft.index + 1, source.input_key, "gives no tokens", "Remove the line.")
            if source.max_prompt_len is not None and len(token_ids) > source.max_prompt_len:
                num_too_long += 1
                continue
            prompts.append(Prompt(draft.index, draft.text, array("i", token_ids), draft.label, draft.metadata))
    if num_too_long:
        log.warning("prompts_too_long", path=str(source.path), count=num_too_long, max_prompt_len=source.max_prompt_len)
    if not prompts:
        rule = f"has no usable prompt ({num_too_long} longer than {source.max_prompt_len} tokens)"
        raise ConfigError([Problem(source.key, str(source.path), rule, "Give a file with at least one prompt.")])
    log.info("prompts_loaded", path=str(source.path), count=len(prompts), num_too_long=num_too_long)
    return PromptSet(tuple(prompts), _fingerprint(prompts), num_too_long)


@dataclass(frozen=True)
class _Draft:
    index: int
    text: str
    label: Any  # Any: see Prompt
    metadata: Mapping[str, Any]


def _lines(source: PromptSource) -> Iterator[tuple[int, bytes]]:
    try:
        with source.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    except OSError as error:
        rule = f"must be a readable JSON-lines file: {error.strerror}"
        raise ConfigError([Problem(source.key, str(source.path), rule)]) from error


def _draft(source: PromptSource, tokenizer: Tokenizer, number: int, line: bytes) -> _Draft:
    try:
        item = json.loads(line)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError too
        raise _problem(source, number, "", f"must be a JSON object on one line: {error}") from error
    if not isinstance(item, dict):
        raise _problem(source, number, "", f"must be a JSON object, got {type(item).__name__}")
    if b"\\u" in line:
        _refuse_lone_surrogates(source, number, item)
    if source.input_key not in item:
        remedy = f"Its keys: {', '.join(map(repr, item)) or 'none'}. The key is named by --input-key."
        raise _problem(source, number, source.input_key, "is missing", remedy)
    label = item.get(source.label_key)
    if label is None and source.label_required:
        remedy = "The built-in rewards need a label on every line; the key is named by --label-key."
        raise _problem(source, number, source.label_key, "is missing", remedy)
    metadata = item.get(source.metadata_key)
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict):
        raise _problem(source, number, source.metadata_key, f"must be an object, got {type(metadata).__name__}")
    return _Draft(number - 1, _text(source, tokenizer, number, item[source.input_key]), label, metadata)


def _refuse_lone_surrogates(source: PromptSource, number: int, item: object) -> None:
    """JSON can name halves of characters, which are no text."""
    try:
        json.dumps(item, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        rule = f"must hold whole characters, got the lone surrogate \\u{ord(error.object[error.start]):x}"
        raise _problem(source, number, "", rule, "Its partner was cut off: write the text anew.") from error


def _text(source: PromptSource, tokenizer: Tokenizer, number: int, value: object) -> str:
    if not source.apply_chat_template:
        if isinstance(value, str) and value:
            return value
        rule = f"must be a non-empty string, got {type(value).__name__}"
        remedy = "A list of messages needs --apply-chat-template." if isinstance(value, list) else ""
        raise _problem(source, number, source.input_key, rule, remedy)
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        rule = "must be a string or a list of messages such as {'role': 'user', 'content': '...'}"
        raise _problem(source, number, source.input_key, rule)
    try:
        return tokenizer.render_chat(messages)
    except BadChat as error:
        raise _problem(source, number, source.input_key, str(error)) from error


def _problem(source: PromptSource, number: int, key: str, rule: str, remedy: str = "") -> ConfigError:
    where = f"{source.path}:{number}"
    return ConfigError([Problem(source.key, where, f"key {key!r} {rule}" if key else rule, remedy)])


def _fingerprint(prompts: list[Prompt]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        rest = json.dumps([prompt.index, prompt.label, prompt.metadata], sort_keys=True)
        digest.update(f"{len(prompt.token_ids)}|{len(rest)}|".encode())
        digest.update(prompt.token_ids.tobytes())
        digest.update(rest.encode())
    return digest.hexdigest()
