"""The synchronous core: versions at update boundaries, KV policies, admission, compaction."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from streamrl.engines.core import EngineCore, plan_prefill
from streamrl.engines.model_runner import ModelRunner
from streamrl.engines.slots import Request, plan_compaction
from streamrl.types import Generation, SamplingParams, expand_versions

Build = Callable[..., PreTrainedModel]
MAX_LENGTH = 96


def new_core(model: PreTrainedModel, slots: int, recompute: bool = False) -> EngineCore:
    return EngineCore(ModelRunner(model, slots, MAX_LENGTH), slots, MAX_LENGTH, recompute=recompute)


def request(prompt: list[int], max_tokens: int, seed: int = 0, temperature: float = 1.0) -> Request:
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
    return Request(np.array(prompt, dtype=np.int32), params)


def drain(core: EngineCore) -> dict[Request, Generation]:
    answers: dict[Request, Generation] = {}
    while core.has_work:
        answers |= core.step()
    return answers


def update(core: EngineCore, version: int, model: PreTrainedModel) -> None:
    core.pause()
    core.load(version, {name: parameter.detach() for name, parameter in model.named_parameters()})
    core.resume()


def random_requests(count: int, seed: int = 0) -> list[Request]:
    rng = np.random.default_rng(seed)
    return [
        request(rng.integers(0, 32, rng.integers(1, 12)).tolist(), int(rng.integers(1, 40)), seed=index)
        for index in range(count)
    ]


def plain_logprobs(model: PreTrainedModel, tokens: list[int]) -> np.ndarray:
    """float64 ``[T − 1]``: log-probs of ``tokens[1:]`` by the model's own forward pass."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens])).logits[0].double()
    return logits.log_softmax(-1)[:-1].gather(1, torch.tensor(tokens)[1:, None])[:, 0].numpy()


def test_with_recompute_every_span_is_scored_exactly_by_the_weights_of_its_version(build: Build) -> None:
    weights = [build(seed=seed) for seed in range(3)]
    core = new_core(build(seed=9), slots=4, recompute=True)
    requests = [request([1, 2, 3 + index], 20 + 3 * index, seed=index) for index in range(6)]
    for each in requests:
        core.add(each)
    answers: dict[Request, Generation] = {}
    for version, steps in enumerate((4, 7, 1)):
        update(core, version, weights[version])
        for _ in range(steps):
            answers |= core.step()
    answers |= drain(core)
    assert answers[requests[0]].versions == [(0, 5), (1, 7), (2, 8)]  # the first step samples twice: prefill and decode
    for each in requests:
        answer = answers[each]
        tokens = each.prompt.tolist() + answer.token_ids.tolist()
        versions = expand_versions(answer.versions)
        assert len(versions) == len(answer.token_ids)
        by_version = [plain_logprobs(model, tokens)[len(each.prompt) - 1 :] for model in weights]
        expected = [by_version[version][index] for index, version in enumerate(versions)]
        np.testing.assert_allclose(answer.logprobs, expected, atol=1e-5)


def test_with_keep_old_kv_stays_and_only_tokens_fed_after_the_update_see_new_weights(build: Build) -> None:
    old, new = build(seed=1), build(seed=2)
    core = new_core(build(seed=9), slots=1)
    update(core, 0, old)
    each = request([4, 5, 6], 12)
    core.add(each)
    for _ in range(4):
        core.step()
    update(core, 1, new)
    answer = drain(core)[each]
    assert answer.versions == [(0, 5), (1, 7)]

    tokens = each.prompt.tolist() + answer.token_ids.tolist()
    fed = len(each.prompt) + 5 - 1  # the fifth token was sampled, but not fed, when the weights changed
    cache = DynamicCache()
    with torch.no_grad():
        before = old(input_ids=torch.tensor([tokens[:fed]]), past_key_values=cache).logits[0]
        after = new(input_ids=torch.tensor([tokens[fed:-1]]), past_key_values=cache).logits[0]
    logprobs = torch.cat([before, after]).double().log_softmax(-1)[len(each.prompt) - 1 :]
    expected = logprobs.gather(1, torch.from_numpy(answer.token_ids.astype(np.int64))[:, None])[:, 0]
    np.testing.assert_allclose(answer.logprobs, expected, atol=1e-5)


def test_slots_under_random_lengths_give_every_request_what_it_gets_alone(build: Build) -> None:
    model = build()
    together = new_core(model, slots=7)
    many = random_requests(60)
    for each in many:
        together.add(each)
    answers = drain(together)
    assert together.statistics().running == together.statistics().waiting == 0
    alone = new_core(model, slots=1)
    for each in many:
        twin = Request(each.prompt, each.params)
        alone.add(twin)
        expected = drain(alone)[twin]
        assert answers[each].token_ids.tolist() == expected.token_ids.tolist()
        assert len(expected.token_ids) == each.params.max_tokens
        np.testing.assert_allclose(answers[each].logprobs, expected.logprobs, atol=1e-5)


def test_requests_of_one_prompt_share_a_prefill_and_still_sample_on_their_own(build: Build) -> None:
    model = build()
    shared = new_core(model, slots=8)
    group = [request([3, 1, 4, 1, 5], 10, seed=seed) for seed in range(6)] + [request([2, 7], 10)]
    for each in group:
        shared.add(each)
    answers = drain(shared)
    assert shared.statistics().prefilled_tokens == 5 + 2
    alone = new_core(model, slots=1)
    for each in group:
        twin = Request(each.prompt, each.params)
        alone.add(twin)
        assert drain(alone)[twin].token_ids.tolist() == answers[each].token_ids.tolist()
    assert len({tuple(answers[each].token_ids) for each in group}) == len(group)


def test_a_backlog_waits_for_several_slots_but_never_for_long(build: Build) -> None:
    core = new_core(build(), slots=8)
    for index in range(8):
        core.add(request([1, 2], 2 if index == 0 else 60, seed=index))
    core.step()
    assert core.statistics().running == 7
    core.add(request([3, 4], 5))
    core.step()
    assert core.statistics().waiting == 0, "all that wait fit: nothing to wait for"
    while core.statistics().running == 8:
        core.step()
    for index in range(2):
        core.add(request([5, 6], 60, seed=index))
    steps = 0
    while core.statistics().waiting == 2:
        core.step()
        steps += 1
    assert steps == 4, "one idle slot for half of eight steps costs as much as a prefill"


def test_cancelling_a_running_or_waiting_request_frees_its_place_and_disturbs_no_other(build: Build) -> None:
    model = build()
    core = new_core(model, slots=3)
    kept = [request([9, 8], 30, seed=1), request([7], 30, seed=2)]
    running, waiting = request([9, 8, 7], 90), request([6], 90)
    for each in (running, *kept, waiting):
        core.add(each)
    core.step()
    core.cancel(waiting)
    core.cancel(running)
    core.cancel(running)
    assert (core.statistics().running, core.statistics().waiting) == (2, 0)
    answers = drain(core)
    assert answers.keys() == set(kept)
    alone = new_core(model, slots=1)
    for each in kept:
        twin = Request(each.prompt, each.params)
        alone.add(twin)
        assert drain(alone)[twin].token_ids.tolist() == answers[each].token_ids.tolist()


def test_the_share_of_the_kv_cache_that_is_taken_follows_what_runs(build: Build) -> None:
    core = new_core(build(), slots=4)
    positions = 4 * MAX_LENGTH
    ended, cancelled = request([3, 1, 4], 4), request([1, 5], 50)
    for each in (ended, cancelled):
        core.add(each)
    core.step()  # samples twice: prefill and decode
    assert core.statistics().kv_used == (5 + 4) / positions
    core.step()
    assert [each for each, _ in core.step()] == [ended]
    assert core.statistics().kv_used == 6 / positions
    core.cancel(cancelled)
    assert core.statistics().kv_used == 0


def test_a_step_prefills_no_more_than_its_budget(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.engines.core.PREFILL_TOKENS", 20)
    core = new_core(build(), slots=8)
    for index in range(5):
        core.add(request([index] * 10, 90))
    core.add(request([4] * 10, 90))
    seen = []
    while core.statistics().waiting:
        core.step()
        seen.append((core.statistics().prefilled_tokens, core.statistics().running))
    assert seen == [(20, 2), (40, 4), (50, 6)]


KINDS = [([1, 2], 1), ([1, 2], 7), ([3], 4), ([5, 6, 7, 8, 9], 30), ([3], 12)]


@pytest.fixture(scope="module")
def answers_alone() -> tuple[PreTrainedModel, list[list[int]]]:
    """A one-layer model and what it answers to each of ``KINDS`` in an engine of one slot."""
    torch.manual_seed(0)
    settings = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.3}
    model = Qwen3ForCausalLM(Qwen3Config(**settings, **heads))
    answers = []
    for index, (prompt, length) in enumerate(KINDS):
        alone, twin = new_core(model, slots=1), request(prompt, length, seed=index)
        alone.add(twin)
        answers.append(drain(alone)[twin].token_ids.tolist())
    return model, answers


@settings(max_examples=40, deadline=None)
@given(
    schedule=st.lists(st.tuples(st.sampled_from(["add", "cancel", "step", "update"]), st.integers(0, 4)), max_size=40)
)
def test_any_schedule_of_arrivals_cancellations_and_updates_changes_no_answer(
    answers_alone: tuple[PreTrainedModel, list[list[int]]], schedule: list[tuple[str, int]]
) -> None:
    model, expected = answers_alone
    core = new_core(model, slots=3, recompute=True)
    live: dict[Request, int] = {}
    answers: dict[Request, Generation] = {}
    for version, (action, index) in enumerate(schedule):
        if action == "add":
            each = request(*KINDS[index], seed=index)
            live[each] = index
            core.add(each)
        elif action == "step":
            answers |= core.step()
        elif action == "update":
            update(core, version, model)
        elif live:
            each = list(live)[index % len(live)]
            if each not in answers:
                del live[each]
            core.cancel(each)
    answers |= drain(core)
    assert {each: answer.token_ids.tolist() for each, answer in answers.items()} == {
        each: expected[index] for each, index in live.items()
    }


@given(st.integers(0, 30), st.data())
def test_compaction_keeps_live_slots_in_front_and_moves_each_at_most_once(count: int, data: st.DataObject) -> None:
    holes = data.draw(st.sets(st.integers(0, count - 1))) if count else set()
    sources, targets = plan_compaction(count, holes)
    live = count - len(holes)
    stayed = set(range(live)) - holes
    assert len(sources) == len(targets)
    assert stayed | set(targets) == set(range(live))
    assert not stayed & set(targets)
    assert set(sources) == set(range(live, count)) - holes


@settings(max_examples=50)
@given(st.lists(st.integers(1, 40), max_size=30), st.integers(1, 100))
def test_prefill_batches_keep_order_and_budget(lengths: list[int], budget: int) -> None:
    batches = plan_prefill([np.zeros(length) for length in lengths], budget)
    assert [index for batch in batches for index in batch] == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[index] for index in batch) <= budget


@pytest.mark.parametrize("budget", [1, 12])
def test_a_small_prefill_budget_changes_no_token(build: Build, monkeypatch: pytest.MonkeyPatch, budget: int) -> None:
    model = build()
    answers = []
    for limit in (4096, budget):
        monkeypatch.setattr("streamrl.engines.core.PREFILL_TOKENS", limit)
        core = new_core(model, slots=8, recompute=True)
        requests = random_requests(12, seed=5)
        for each in requests:
            core.add(each)
        done = core.step()
        update(core, 0, model)
        done += drain(core).items()
        answers.append([dict(done)[each].token_ids.tolist() for each in requests])
    assert answers[0] == answers[1]
