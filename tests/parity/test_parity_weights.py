"""Perturbed weights, and what digests say of the weights that an engine holds."""

from __future__ import annotations

import pytest
import torch
from parity_support import build

from streamrl.parity.weights import Ledger, Perturbed, after_the_cache, digest, digests


def tensors(tied: bool = False) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in build(tied).named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_perturbed_copy_differs_in_every_tensor_and_keeps_shape_dtype_and_scale(dtype: torch.dtype) -> None:
    own = {name: tensor.to(dtype) for name, tensor in tensors().items()} | {"bias": torch.zeros(5, dtype=dtype)}
    before = digests(own)
    other = Perturbed(own)
    for name, tensor in own.items():
        changed = other[name]
        assert (changed.shape, changed.dtype) == (tensor.shape, tensor.dtype)
        assert not torch.equal(changed, tensor)
        assert changed.abs().max() <= 1.3 * tensor.abs().max() + 0.06
    assert digests(own) == before, "the weights themselves stay as they are"


def test_only_named_tensors_are_perturbed() -> None:
    own = tensors()
    other = Perturbed(own, ["model.norm.weight"])
    assert [name for name in own if not torch.equal(own[name], other[name])] == ["model.norm.weight"]


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["model.embed_tokens.weight", "model.layers.0.input_layernorm.weight", "model.norm.weight", "lm_head.weight"],
         ["model.norm.weight"]),
        (["transformer.wte.weight", "transformer.h.0.ln_1.weight", "transformer.ln_f.weight", "transformer.ln_f.bias"],
         ["transformer.ln_f.weight", "transformer.ln_f.bias"]),
        (["word_embeddings_layernorm.weight", "h.0.weight", "lm_head.weight"], ["lm_head.weight"]),
        (["embed.weight", "blocks.0.weight"], []),
    ],
)  # fmt: skip
def test_what_lies_after_the_kv_cache_is_known_by_its_name(names: list[str], found: list[str]) -> None:
    assert after_the_cache(dict.fromkeys(names)) == found


def test_a_digest_is_of_the_bytes_in_order_wherever_they_lie() -> None:
    rows = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    assert digest(rows) == digest(rows.clone())
    assert digest(rows.T) == digest(rows.T.contiguous())
    assert digest(rows) != digest(rows.T)
    assert digest(torch.zeros(0)) == digest(torch.zeros(0))


SENT = {"a": 1, "b": 2, "c": 3}
BEFORE = {"a": 11, "b": 12, "c": 13}


@pytest.mark.parametrize(
    ("held", "said"),
    [
        (SENT, ""),
        (BEFORE, "the weights are one version behind: the engine holds those of before the update"),
        (SENT | {"b": 12}, "tensor b not loaded: the engine holds what was there before the update"),
        (SENT | {"a": 3, "c": 1}, "tensors a and c are swapped"),
        (SENT | {"c": 99}, "tensor c: the engine holds something that was not sent"),
        ({"a": 1, "b": 2}, "tensor c: the engine holds something that was not sent"),
    ],
    ids=["right", "behind", "lost", "swapped", "other", "missing"],
)
def test_the_ledger_says_what_became_of_an_update(held: dict[str, int], said: str) -> None:
    ledger = Ledger(
        initial={"a": 21, "b": 22, "c": 23},
        first={"a": 31, "b": 32, "c": 33},
        previous=BEFORE,
        before=BEFORE,
        sent=SENT,
    )
    assert ledger.wrong(held) == said


def test_a_tensor_that_no_update_changes_is_found_although_it_has_the_right_values_by_chance() -> None:
    ledger = Ledger(initial=SENT, first=BEFORE | {"b": 2}, previous=BEFORE, before=BEFORE | {"b": 2}, sent=SENT)
    assert ledger.wrong(SENT) == "tensor b not loaded: no update changes what the engine holds"


def test_an_engine_that_cannot_tell_is_not_accused() -> None:
    assert Ledger().wrong({}) == ""
