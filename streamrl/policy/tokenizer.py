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

ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|call|>")
"""Begin a message, and a tool call within one. With them the vocabulary is 104 = 8 × 13, so that embedding rows split
evenly over up to eight ranks."""

CHAT_TEMPLATE = """\
{%- macro signatures() -%}
    {%- for tool in tools -%}
        {{ tool.function.name }}({{ tool.function.parameters.properties | default({}) | join(',') }})
        {%- if not loop.last %},{% endif -%}
    {%- endfor -%}
{%- endmacro -%}
{%- if tools and messages[0].role != 'system' -%}
    {{ '<|system|>' + signatures() + eos_token }}
{%- endif -%}
{%- for message in messages -%}
    {{ '<|' + message.role + '|>' + (message.content or '') }}
    {%- if loop.first and tools and message.role == 'system' %}{{ '\\n' + signatures() }}{% endif -%}
    {%- for call in message.tool_calls or [] -%}
        {{ '<|call|>' + call.function.name + '(' }}
        {%- if call.function.arguments is string %}{{ call.function.arguments }}
        {%- else %}{% for name, value in call.function.arguments.items() -%}
            {{ name + '=' + value | tojson }}{% if not loop.last %},{% endif %}
        {%- endfor %}{% endif -%}
        {{ ')' }}
    {%- endfor -%}
    {{ eos_token }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif -%}
"""
"""``<|system|>…<eos><|user|>3+4?<eos><|assistant|><|call|>add(a=3,b=4)<eos><|tool|>7<eos><|assistant|>7<eos>``.

Tools stand in the system message as ``add(a,b)``; a call is what ``tool_format=compact`` reads. One token per role.
"""


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; ``decode(encode(text)) == text`` for any text of ``CHARACTERS``.

    ``<pad>`` is 0, ``<eos>`` 1, ``<unk>`` 2, 3 to 7 are ``ROLES``. Nothing is added to a text when it is encoded.
    """
    tokens = [PAD, EOS, UNK, *ROLES, *CHARACTERS]
    core = Tokenizer(WordLevel({token: index for index, token in enumerate(tokens)}, unk_token=UNK))
    core.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")  # a plain dot would leave runs of newlines in one piece
    core.decoder = Fuse()
    options: dict[str, Any] = {
        "additional_special_tokens": list(ROLES),
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,  # a text that spells <eos> is five characters, not the end
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, eos_token=EOS, unk_token=UNK, chat_template=CHAT_TEMPLATE, **options
    )
