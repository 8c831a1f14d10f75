"""Text to ids and back.

It owns the only use of transformers' tokenizers. Encoding and decoding go straight to the Rust tokenizer underneath;
the chat template goes through transformers. It must never be asked to decode ids outside its vocabulary by accident:
ids are checked when a request comes in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

REPLACEMENT = "\ufffd"
LONGEST_WAIT = 32  # tokens; a character that is not complete by then is broken for good


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's spelling of bytes: printable Latin-1 as itself, the rest from code point 256 on, in order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    shifted = {chr(256 + at): byte for at, byte in enumerate(rest)}
    return {chr(byte): byte for byte in printable} | shifted


BYTE_OF = _byte_alphabet()


class Tokenizer:
    """A checkpoint's tokenizer."""

    def __init__(self, path: str) -> None:
        from transformers import AutoTokenizer

        full: Any = AutoTokenizer.from_pretrained(path)  # transformers types it as a union of classes
        self._full = full
        self._fast = full.backend_tokenizer  # a tokenizers.Tokenizer, untyped
        eos = full.eos_token_id
        self.eos_token_ids: tuple[int, ...] = () if eos is None else (int(eos),)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, with the tokenizer's own special tokens."""
        return self._fast.encode(text, add_special_tokens=True).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids; incomplete characters become the replacement character."""
        return self._fast.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token: int) -> str:
        """Return the text of one id, as log-prob entries show it."""
        return self._fast.decode([token], skip_special_tokens=False)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one id, also where they are no whole character."""
        text = self.token_text(token)
        piece = self._fast.id_to_token(token) or ""
        if REPLACEMENT not in text or any(character not in BYTE_OF for character in piece):
            return text.encode()
        return bytes(BYTE_OF[character] for character in piece)

    def token_name(self, token: int) -> str:
        """Return a text of one id that tells it from others: its text, or its spelling if it is a part of one."""
        text = self.token_text(token)
        return text if REPLACEMENT not in text else self._fast.id_to_token(token) or text

    def chat_ids(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> list[int]:
        """Return the prompt of a conversation by the checkpoint's chat template; ValueError if it has none."""
        text = self._full.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **options)
        return self._fast.encode(text, add_special_tokens=False).ids


class TextStream:
    """The text of a growing list of ids, given out only when its last character is complete."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        self.text = ""
        self._prefix = 0
        self._read = 0

    def extend(self, ids: Sequence[int]) -> str:
        """Take the whole list so far; return the whole text that is certain so far."""
        before = self._decode(ids[self._prefix : self._read])
        now = self._decode(ids[self._prefix :])
        complete = not now.endswith(REPLACEMENT) or len(ids) - self._read > LONGEST_WAIT
        if len(now) > len(before) and complete:
            self.text += now[len(before) :]
            self._prefix, self._read = self._read, len(ids)
        return self.text

    def pending(self, ids: Sequence[int]) -> str:
        """Return `text` and what is not certain yet, for a search that must not wait."""
        before = self._decode(ids[self._prefix : self._read])
        return self.text + self._decode(ids[self._prefix :])[len(before) :]

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=self.skip_special_tokens)
