"""The supervised phase: what the loss counts, when it ends, what it refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from transformers import Qwen3Config, Qwen3ForCausalLM

from streamrl.errors import ConfigError, DivergedError
from streamrl.policy import warmup
from streamrl.policy.tokenizer import character_tokenizer
from streamrl.policy.warmup import FIRST_PROBE, FIRST_TASK, Lesson, Lessons, StopRule, WarmedUp, exact_share, warm_up
from streamrl.schema import WarmupConfig

torch.set_num_threads(1)
TOKENIZER = character_tokenizer()


def small_model(seed: int = 0) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(TOKENIZER),
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=64,
            initializer_range=0.1,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
        )
    )


Pairs = Callable[[int], tuple[str, str]]


def uneven(index: int) -> tuple[str, str]:
    """Prompts and answers of several lengths."""
    return f"{'ab' * (index % 3)}{index % 5}=", "xyz"[: 1 + index % 3]


def lessons(pairs: Pairs) -> Lessons:
    """Prompt and answer as a lesson."""

    def lesson(index: int) -> Lesson:
        prompt, answer = pairs(index)
        return [(prompt, False), (answer, True)]

    return lesson


def run(model: Qwen3ForCausalLM, config: WarmupConfig, pairs: Pairs = uneven, max_length: int = 32) -> WarmedUp:
    return warm_up(model, TOKENIZER, lessons(pairs), config, max_length, lambda done, total, text: None)


def greedy(model: Qwen3ForCausalLM, prompt: str, length: int) -> list[int]:
    """Greedy decoding, one whole forward pass per token."""
    ids = TOKENIZER.encode(prompt)
    for _ in range(length):
        with torch.no_grad():
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[-length:]


def test_the_loss_is_the_mean_over_answer_and_end_tokens_whatever_the_padding_and_the_chunks(
    monkeypatch: pytest.MonkeyPatch,
):
    model = small_model()
    pairs = [uneven(FIRST_TASK + row) for row in range(7)]
    losses: list[torch.Tensor] = []
    for prompt, answer in pairs:  # one pair at a time, without padding
        question, reply = TOKENIZER.encode(prompt), [*TOKENIZER.encode(answer), TOKENIZER.eos_token_id]
        logits = model(input_ids=torch.tensor([question + reply])).logits[0, len(question) - 1 : -1]
        losses += list(F.cross_entropy(logits, torch.tensor(reply), reduction="none"))
    expected = torch.stack(losses).mean().item()

    monkeypatch.setattr(warmup, "_ROW_TOKENS", 20)  # several forward passes in the step
    assert run(model, WarmupConfig(steps=1, batch=7)).loss == pytest.approx(expected, rel=1e-5)


def test_one_step_moves_the_weights_as_adamw_on_the_unpadded_batch(monkeypatch: pytest.MonkeyPatch):
    """First update at lr/20 with the gradient of the mean loss, clipped to norm 1; computed pair by pair."""
    model, reference = small_model(), small_model()
    monkeypatch.setattr(warmup, "_ROW_TOKENS", 20)
    run(model, WarmupConfig(steps=1, batch=5, lr=1e-2))

    pairs = [uneven(FIRST_TASK + row) for row in range(5)]
    count = sum(len(answer) + 1 for _, answer in pairs)
    for prompt, answer in pairs:
        question, reply = TOKENIZER.encode(prompt), [*TOKENIZER.encode(answer), TOKENIZER.eos_token_id]
        logits = reference(input_ids=torch.tensor([question + reply])).logits[0, len(question) - 1 : -1]
        (F.cross_entropy(logits, torch.tensor(reply), reduction="sum") / count).backward()
    torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
    torch.optim.AdamW(reference.parameters(), lr=1e-2 / 20, betas=(0.9, 0.98), weight_decay=0.01).step()
    for (name, moved), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        # an Adam step is lr × g/|g|: where g is rounding only, its sign is open
        assert torch.allclose(moved, expected, atol=2e-5), name


def test_exact_share_agrees_with_greedy_decoding():
    model = small_model(seed=3)
    pairs = []
    for index in range(40):
        prompt, _ = uneven(index)
        decoded = greedy(model, prompt, 3)
        wrong = [(decoded[0] + 1) % 90 + 8, *decoded[1:]]
        pairs.append((prompt, decoded if index % 4 else wrong))
    rows = [(TOKENIZER.encode(prompt), reply) for prompt, reply in pairs]
    width = max(len(question) + len(reply) for question, reply in rows) - 1
    inputs = torch.zeros(len(rows), width, dtype=torch.long)
    targets = torch.full((len(rows), width), -100)
    for row, (question, reply) in enumerate(rows):
        inputs[row, : len(question) + 2] = torch.tensor(question + reply[:2])
        targets[row, len(question) - 1 : len(question) + 2] = torch.tensor(reply)
    assert exact_share(model, warmup.Encoded(inputs, targets)) == 30 / 40


def test_a_model_learns_to_copy_a_digit_and_to_end_its_answer():
    model = small_model()

    def copying(index: int) -> tuple[str, str]:
        return f"{index % 10}=", str(index % 10)

    ended = run(model, WarmupConfig(steps=60, batch=20, lr=1e-2), copying)
    assert ended.accuracy == 1.0
    assert greedy(model, "7=", 2) == [*TOKENIZER.encode("7"), TOKENIZER.eos_token_id]
    assert not model.training


def test_the_warm_up_ends_early_with_at_most_the_accuracy_asked_for():
    model = small_model()

    def copying(index: int) -> tuple[str, str]:
        return f"{index % 10}=", str(index % 10)

    told: list[tuple[int, int]] = []
    config = WarmupConfig(steps=400, batch=20, lr=3e-3, stop_accuracy=0.5)
    ended = warm_up(
        model, TOKENIZER, lessons(copying), config, 32, lambda done, total, text: told.append((done, total))
    )
    probes = warmup._encode(TOKENIZER, [lessons(copying)(FIRST_PROBE + index) for index in range(warmup.PROBES)], 32)
    assert exact_share(model, probes) == ended.accuracy <= 0.5
    assert 0 < ended.steps < told[-1][0] < 400
    assert {total for _, total in told} == {400}


def test_the_stop_rule_waits_for_a_mean_of_eight_and_keeps_the_newest_weights_not_over_the_target():
    model = torch.nn.Linear(1, 1, bias=False)
    rule = StopRule(model, 0.5)
    accuracies = [
        0.1,
        0.9,
        0.2,
        0.6,
        0.7,
        0.5,
        0.8,
        0.1,
        0.9,
    ]  # the mean of the first eight is 0.4875, of the last 0.5875
    reached = []
    for step, accuracy in enumerate(accuracies):
        with torch.no_grad():
            model.weight.fill_(float(step))
        reached.append(rule.reached(WarmedUp(step, 0.0, accuracy)))
    assert reached == [False] * 8 + [True]
    assert rule.restore() == WarmedUp(7, 0.0, 0.1)
    assert model.weight.item() == 7.0


def test_the_warm_up_sees_no_more_distinct_tasks_than_it_is_allowed():
    seen: set[int] = set()

    def recorded(index: int) -> tuple[str, str]:
        seen.add(index)
        return uneven(index)

    run(small_model(), WarmupConfig(steps=4, batch=3, tasks=5), recorded)
    trained = {index for index in seen if index < FIRST_PROBE}
    assert trained == set(range(FIRST_TASK, FIRST_TASK + 5))


def test_the_same_start_ends_in_the_same_weights():
    first = small_model()
    second = copy.deepcopy(first)
    run(first, WarmupConfig(steps=3, batch=4))
    torch.rand(7)
    run(second, WarmupConfig(steps=3, batch=4))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize(("prompt", "answer"), [("", "4"), ("2+2=", "")])
def test_a_task_without_prompt_or_answer_is_refused_with_the_way_out(prompt: str, answer: str):
    with pytest.raises(ConfigError, match="tasks with a prompt and an answer.*or model.warmup.steps=0"):
        run(small_model(), WarmupConfig(steps=1, batch=1), lambda index: (prompt, answer))


def test_a_lesson_of_several_turns_is_learnt_where_it_says_so_and_nowhere_else():
    lesson: Lesson = [("ab", False), ("c", True), ([9, 10], False), ([11, 12], True), ("left out", False), ("d", True)]
    encoded = warmup._encode(TOKENIZER, [lesson], 32)
    a, b, c, d, end = *TOKENIZER.encode("abcd"), TOKENIZER.eos_token_id
    between = TOKENIZER.encode("left out")
    assert encoded.inputs[0].tolist() == [a, b, c, end, 9, 10, 11, 12, *between, d]
    none = [-100] * (len(between) - 1)
    assert encoded.targets[0].tolist() == [-100, c, end, -100, -100, 11, 12, -100, *none, d, end]


def test_a_pair_longer_than_the_model_allows_is_refused():
    with pytest.raises(ConfigError, match=r"model.max_length=8 is too short .* are 9 tokens; raise model.max_length"):
        run(small_model(), WarmupConfig(steps=1, batch=1), lambda index: ("12345=", "15"), max_length=8)


def test_a_gradient_that_is_not_finite_ends_the_warm_up():
    model = small_model()
    with torch.no_grad():
        model.get_output_embeddings().weight[0, 0] = float("inf")
    with pytest.raises(DivergedError, match="lower model.warmup.lr"):
        run(model, WarmupConfig(steps=1, batch=2))
