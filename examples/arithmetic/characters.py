"""The tokenizer of the example: 32 tokens, one a character.

Owns the vocabulary and the two tokenizer files. It adds nothing to a text by itself: no beginning token,
no template. A character it does not know becomes <unk>.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
# More than a sum needs, so that another task (products, brackets, equations) can keep the vocabulary.
CHARACTERS = "0123456789+-*/%^=()<>,.:;?! "
VOCABULARY = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
PAD_ID, BOS_ID, EOS_ID, UNK_ID = range(len(SPECIAL_TOKENS))
ZERO_ID = VOCABULARY["0"]


def build_tokenizer() -> "Tokenizer":
    """A WordLevel tokenizer whose words are single characters; decoding joins them without spaces."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def save_tokenizer(folder: Path, *, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json, as transformers 4 and 5 both read them."""
    build_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
