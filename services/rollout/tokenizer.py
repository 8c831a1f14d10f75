"""Text to tokens and back, by the model folder's tokenizer.json, and prompts to the model's chat format.

The only file here that imports tokenizers and jinja2. Never imports transformers or torch: rollout stays small.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from furlong.config import ConfigError, RunConfig
from furlong.config.errors import Problem

Messages = Sequence[Mapping[str, Any]]  # Any: a chat message's content is the template's business


class BadChat(ValueError):
    """The chat template refused the messages."""


@dataclass(frozen=True)
class ModelLimits:
    """What the model itself bounds."""

    vocab_size: int
    """Token ids are below this."""
    context_len: int | None
    """Most tokens of prompt and response together. None: the model does not say."""


class Tokenizer:
    """A tokenizer folder, loaded."""

    def __init__(self, folder: Path, *, key: str) -> None:
        """Raises ConfigError naming the key when the folder has no usable tokenizer.json."""
        path = folder / "tokenizer.json"
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception, for a missing file too
            remedy = "Name a folder that holds tokenizer.json."
            raise ConfigError([Problem(key, str(folder), f"needs {path}: {error}", remedy)]) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._folder = folder
        self._chat: _ChatTemplate | None = None

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Token ids of each text."""
        encoded = self._tokenizer.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        return [item.ids for item in encoded]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, special ones left out. For logs and rewards; training never reads it."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def render_chat(self, messages: Messages) -> str:
        """Messages in the model's chat format, ready for the assistant's turn.

        Raises BadChat when the template refuses them, ConfigError when the model has no template.
        """
        if self._chat is None:
            self._chat = _ChatTemplate(self._folder)
        return self._chat.render(messages)


class _ChatTemplate:
    def __init__(self, folder: Path) -> None:
        import jinja2.ext
        import jinja2.sandbox

        settings = _read_object(folder / "tokenizer_config.json")
        own = folder / "chat_template.jinja"
        source = own.read_text() if own.exists() else settings.get("chat_template")
        if not isinstance(source, str):
            rule = f"needs a chat template, and {folder} has none"
            remedy = "Add chat_template.jinja to the tokenizer's folder, or leave --apply-chat-template out."
            raise ConfigError([Problem("rollout.apply_chat_template", True, rule, remedy)])
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        names: dict[str, Any] = environment.globals  # Any: the library types it as its own functions only
        names["raise_exception"] = _refuse
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            rule = f"the chat template of {folder} does not compile: {error}"
            raise ConfigError([Problem("rollout.apply_chat_template", True, rule)]) from error
        self._error = jinja2.TemplateError
        self._special = {
            name: _special_text(settings.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        }

    def render(self, messages: Messages) -> str:
        try:
            return self._template.render(messages=list(messages), add_generation_prompt=True, **self._special)
        except (self._error, TypeError) as error:
            raise BadChat(f"the chat template refused the messages: {error}") from error


def _special_text(token: object) -> str:
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _refuse(message: str) -> str:
    raise BadChat(message)


def _to_json(value: object, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def load_tokenizer(config: RunConfig) -> Tokenizer:
    """The tokenizer that the run names."""
    if config.model.tokenizer:
        return Tokenizer(Path(config.model.tokenizer), key="model.tokenizer")
    return Tokenizer(Path(config.model.hf_checkpoint), key="model.hf_checkpoint")


def read_model_limits(folder: Path) -> ModelLimits:
    """Vocabulary and context of the model in a folder. Raises ConfigError."""
    path = folder / "config.json"
    settings = _read_object(path)
    settings = settings.get("text_config") or settings
    vocab_size = settings.get("vocab_size")
    if not isinstance(vocab_size, int) or vocab_size < 1:
        rule = f"needs {path} with a vocab_size"
        remedy = "Name a folder of a transformers model."
        raise ConfigError([Problem("model.hf_checkpoint", str(folder), rule, remedy)])
    context_len = settings.get("max_position_embeddings")
    return ModelLimits(vocab_size, context_len if isinstance(context_len, int) else None)


def _read_object(path: Path) -> dict[str, Any]:  # Any: a JSON object that others wrote
    try:
        tree = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError([Problem("model", str(path), f"must be a JSON file: {error}")]) from error
    return tree if isinstance(tree, dict) else {}
