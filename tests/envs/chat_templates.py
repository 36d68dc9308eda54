"""A byte-level tokenizer and chat templates of the shapes that models have, written by hand."""

from __future__ import annotations

import functools

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|begin|>", "<|header|>", "<|/header|>", "<|eot|>", "<s>", "</s>", "<|end|>")
SPECIAL += ("<|python_tag|>",)
CORPUS = (
    "the answer is forty two and the sum of the numbers is right, hello world, tool_call name arguments user",
) * 4

CHATML = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n' }}{% endif %}
{{- 'Tools, called as <tool_call>{json}</tool_call>:' }}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content and loop.index0 > ns.last %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content.lstrip('\\n') }}
        {%- for call in message.tool_calls or [] %}
            {%- if not loop.first or message.content %}{{ '\\n' }}{% endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""As Qwen3: reasoning is dropped from turns before the last question; neighbouring tool results share a message."""

THINKS = CHATML.removesuffix("{% endif %}") + "{{ '<think>\\n' }}{% endif %}"
"""The template opens the reasoning."""

HEADERS = """\
{{- '<|begin|>' }}
{%- if tools %}{{ '<|header|>system<|/header|>\\n\\n{"name": …, "parameters": …}' }}
{%- for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '<|eot|>' }}{% endif %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{ raise_exception('only single tool-calls at once') }}{% endif %}
        {{- '<|header|>assistant<|/header|>\\n\\n{"name": "' + message.tool_calls[0].function.name + '", ' }}
        {{- '"parameters": ' }}{{ message.tool_calls[0].function.arguments | tojson }}{{ '}<|eot|>' }}
    {%- else %}
        {{- '<|header|>' + (message.role | replace('tool', 'ipython')) + '<|/header|>\\n\\n' }}
        {{- message.content | trim }}{{ '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|header|>assistant<|/header|>\\n\\n' }}{% endif %}"""
"""As Llama 3: one call per answer; text is trimmed."""

INSTRUCTION = """\
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant') }}
    {%- endif %}
    {%- if message.role == 'user' %}{{ '<s>[INST] ' + message.content + ' [/INST]' }}
    {%- else %}{{ ' ' + message.content + ' </s>' }}{% endif %}
{%- endfor %}"""
"""As Llama 2: no prompt for the answer, a space before the token that closes it."""

PLAIN = """\
{%- for message in messages %}{{ message.role + ': ' + message.content + '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""
"""No special token at all."""

FORGETFUL = "{{ messages[-1].role + ': ' + messages[-1].content }}"
"""Writes the last message only."""

ENDS = {CHATML: "<|im_end|>", THINKS: "<|im_end|>", HEADERS: "<|eot|>", INSTRUCTION: "</s>"}


@functools.cache
def _core() -> str:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    )
    return core.to_str()


@functools.cache
def tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE with a few merges, and ``template``."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_core()),
        eos_token=ENDS.get(template, "<|end|>"),
        additional_special_tokens=list(SPECIAL),
        chat_template=template,
    )


def tool(name: str, *parameters: str) -> dict[str, object]:
    properties = {each: {"type": "integer"} for each in parameters}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": schema}}


def user(text: str) -> dict[str, object]:
    return {"role": "user", "content": text}


def assistant(text: str | None, *calls: tuple[str, str], reasoning: str = "") -> dict[str, object]:
    """``calls``: name and arguments as JSON."""
    message: dict[str, object] = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": f"call{place:05d}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for place, (name, arguments) in enumerate(calls)
        ]
    return message


def result(text: str, call: str = "call00000") -> dict[str, object]:
    return {"role": "tool", "content": text, "tool_call_id": call}


def system(text: str) -> dict[str, object]:
    return {"role": "system", "content": text}
