"""A character-level tokenizer for models that are built on this machine; nothing is downloaded."""

from __future__ import annotations

from string import printable
from typing import Any

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
CHARACTERS = "\n" + "".join(sorted(set(printable) - set("\t\n\r\x0b\x0c")))
"""The newline and the 95 printable ASCII characters; any other character is read as ``<unk>``, never dropped."""

_UNUSED = tuple(f"<unused-{index}>" for index in range(5))
"""Fill the vocabulary to 104 = 8 × 13, so that embedding rows split evenly over up to eight ranks."""


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; ``decode(encode(text)) == text`` for any text of ``CHARACTERS``.

    ``<pad>`` is 0, ``<eos>`` 1, ``<unk>`` 2. Nothing is added to a text when it is encoded.
    """
    tokens = [PAD, EOS, UNK, *_UNUSED, *CHARACTERS]
    core = Tokenizer(WordLevel({token: index for index, token in enumerate(tokens)}, unk_token=UNK))
    core.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")  # a plain dot would leave runs of newlines in one piece
    core.decoder = Fuse()
    options: dict[str, Any] = {
        "additional_special_tokens": list(_UNUSED),
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,  # a text that spells <eos> is five characters, not the end
    }
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token=PAD, eos_token=EOS, unk_token=UNK, **options)
