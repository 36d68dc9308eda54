"""The settings of adapters: what is refused before a run starts, and the way out."""

from __future__ import annotations

import importlib.util

import pytest

from streamrl.config import load_config
from streamrl.errors import ConfigError


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as refused:
        load_config(None, list(overrides))
    return str(refused.value)


def test_without_a_rank_nothing_is_asked_of_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert load_config(None, []).model.lora.rank == 0


def test_a_rank_without_peft_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert refusal("model.lora.rank=8") == "model.lora.rank=8 needs peft: pip install 'streamrl[lora]'"


def test_sglang_takes_no_adapters() -> None:
    assert refusal("model.lora.rank=8", "engine=sglang") == (
        "model.lora.rank=8 with engine.name=sglang: it cannot replace an adapter under requests in flight; set "
        "engine.name=vllm or embedded, or model.lora.rank=0"
    )


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.lora.rank=-1", "model.lora.rank=-1: must be at least 0 and finite"),
        ("model.lora.alpha=0", "model.lora.alpha=0.0: must be positive and finite"),
    ],
)
def test_numbers_out_of_range_are_refused(override: str, said: str) -> None:
    assert refusal(override) == said
