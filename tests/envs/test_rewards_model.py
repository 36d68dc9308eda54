"""The served reward model gives every answer the score of a forward pass of its own."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from reward_models import make_reward_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from streamrl.actors.scorer import ScorerServer
from streamrl.buffers.links.link_zmq import ClientLink
from streamrl.buffers.wire.messages import LeaseRequest
from streamrl.clock import RealClock
from streamrl.envs import Task
from streamrl.envs.rewards import load_reward
from streamrl.envs.rewards.model import ScorerAddress, use_scorer
from streamrl.errors import ConfigError, EnvironmentFailed, WireError
from streamrl.policy.reward_model import RewardModel

ANSWERS = ["2", "I think it is two.", "", "3" * 40, "<eos>", "no"]
TASK = Task(prompt="1+1? ")
CLOSE = 1e-4
"""Of scores of some units: padded batches add up in another order."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reward_model(tmp_path_factory.mktemp("reward") / "model")


@pytest.fixture(autouse=True)
def no_scorer() -> Iterator[None]:
    yield
    use_scorer(None)


def direct(folder: Path, text: str) -> float:
    """By a plain forward pass of the text alone."""
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    with torch.inference_mode():
        return float(model(input_ids=torch.tensor([tokenizer.encode(text)])).logits[0, 0])


def expected(folder: Path) -> list[float]:
    scores = [direct(folder, TASK.prompt + answer) for answer in ANSWERS]
    assert max(scores) - min(scores) > 1000 * CLOSE
    return scores


def test_a_batch_gives_each_row_the_score_of_a_forward_pass_of_its_own(folder: Path) -> None:
    model = RewardModel(folder, max_length=100)
    scores = model.score([[("user", TASK.prompt), ("assistant", answer)] for answer in ANSWERS])
    assert scores == pytest.approx(expected(folder), abs=CLOSE)


def test_a_model_with_a_padding_token_gives_the_same_scores(tmp_path: Path) -> None:
    folder = make_reward_model(tmp_path / "padded", pad_token_id=0)
    scores = RewardModel(folder, max_length=100).score([[("user", TASK.prompt + answer)] for answer in ANSWERS])
    assert scores == pytest.approx(expected(folder), abs=CLOSE)


def test_a_conversation_is_rendered_by_the_models_own_chat_template(tmp_path: Path) -> None:
    folder = make_reward_model(tmp_path / "chat")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    (score,) = RewardModel(folder, max_length=100).score([[("user", "a"), ("assistant", "b")]])
    assert score == pytest.approx(direct(folder, "[user]a[assistant]b"), abs=CLOSE)


def test_one_answer_that_is_too_long_is_refused_and_harms_no_other(folder: Path) -> None:
    first, second = RewardModel(folder, max_length=4).score([[("user", "a" * 5)], [("user", "a" * 4)]])
    assert first == "reward model: expected 1 to reward_model.max_length=4 tokens, got 5"
    assert second == pytest.approx(direct(folder, "aaaa"), abs=CLOSE)


def test_a_checkpoint_without_a_score_head_is_refused(tmp_path: Path) -> None:
    config = Qwen3Config(
        vocab_size=104, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, num_labels=1,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    make_reward_model(tmp_path / "tokenizer")
    for file in (tmp_path / "tokenizer").glob("tokenizer*"):
        file.rename(tmp_path / file.name)
    with pytest.raises(ConfigError, match=r"has no weights for score\.weight, so it is no reward model"):
        RewardModel(tmp_path, max_length=100)


def test_a_model_with_two_labels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a model with one label, got 2"):
        RewardModel(make_reward_model(tmp_path, labels=2), max_length=100)


def test_a_model_that_takes_fewer_tokens_is_refused_with_the_number_to_set(tmp_path: Path) -> None:
    folder = make_reward_model(tmp_path, max_position_embeddings=64)
    with pytest.raises(ConfigError, match="takes 64 tokens at most; set reward_model.max_length=64"):
        RewardModel(folder, max_length=65)


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json in it"):
        RewardModel(tmp_path, max_length=100)


# Served ---------------------------------------------------------------------------------------------------------------

Score = Callable[[Sequence[Any]], list[float | str]]


async def serving(endpoint: str, score: Score, use: Awaitable[Any], batch: int = 4) -> Any:
    """The result of ``use`` while ``score`` is served."""
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    events: list[str] = []
    with ThreadPoolExecutor(1) as worker:
        server = ScorerServer(
            endpoint, score, worker, batch, RealClock(), lambda name, _: events.append(name), failed.set_exception
        )
        server.bind()
        running = asyncio.create_task(server.run())
        try:
            async with asyncio.timeout(60):
                return await use
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


def endpoint_in(tmp_path: Path) -> str:
    endpoint = f"ipc://{tmp_path}/scorer"
    use_scorer(ScorerAddress(endpoint, "rollouter-0.0"))
    return endpoint


async def scores_of(*answers: Any, **options: Any) -> list[Any]:
    reward = load_reward({"name": "model", **options})
    try:
        return await asyncio.gather(*(reward(TASK, answer) for answer in answers), return_exceptions=True)
    finally:
        await reward.close()


def test_answers_that_are_asked_for_at_once_get_their_own_scores(folder: Path, tmp_path: Path) -> None:
    endpoint = endpoint_in(tmp_path)
    model = RewardModel(folder, max_length=100)
    scores = asyncio.run(serving(endpoint, model.score, scores_of(*ANSWERS)))
    assert scores == pytest.approx(expected(folder), abs=CLOSE)


def test_what_comes_during_one_batch_is_the_next_and_no_batch_is_too_large(tmp_path: Path) -> None:
    batches: list[int] = []
    begun, go = threading.Event(), threading.Event()

    def score(conversations: Sequence[Any]) -> list[float | str]:
        batches.append(len(conversations))
        begun.set()
        assert go.wait(60)
        return [float(conversation[-1][1]) for conversation in conversations]

    async def use() -> list[Any]:
        reward = load_reward("model")
        first = asyncio.create_task(reward(TASK, "0"))  # type: ignore[arg-type]
        await asyncio.to_thread(begun.wait, 60)
        others = [asyncio.create_task(reward(TASK, str(n))) for n in range(1, 7)]  # type: ignore[arg-type]
        await asyncio.sleep(0.2)  # they travel by a socket; whenever they come, no batch may be over 4
        go.set()
        scores = await asyncio.gather(first, *others)
        await reward.close()
        return scores

    assert asyncio.run(serving(endpoint_in(tmp_path), score, use())) == list(range(7))
    assert batches[0] == 1
    assert max(batches) <= 4
    assert sum(batches) == 7


def test_an_answer_that_cannot_be_scored_is_a_failure_not_a_zero(tmp_path: Path) -> None:
    (error,) = asyncio.run(serving(endpoint_in(tmp_path), lambda _: ["reward model: too long"], scores_of("x")))
    assert isinstance(error, EnvironmentFailed)
    assert "reward model: too long" in str(error)


def test_a_sigmoid_brings_scores_between_0_and_1(tmp_path: Path) -> None:
    def score(conversations: Sequence[Any]) -> list[float | str]:
        return [float(conversation[-1][1]) for conversation in conversations]

    use = scores_of("0", "2", "-2", "-1000", sigmoid=True)
    assert asyncio.run(serving(endpoint_in(tmp_path), score, use)) == pytest.approx(
        [0.5, 1 / (1 + math.exp(-2)), 1 / (1 + math.exp(2)), 0.0]
    )


def test_messages_are_scored_as_they_are(tmp_path: Path) -> None:
    seen: list[Any] = []

    def score(conversations: Sequence[Any]) -> list[float | str]:
        seen.extend(conversations)
        return [1.0] * len(conversations)

    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}, {"role": "tool", "content": "c"}]
    asyncio.run(serving(endpoint_in(tmp_path), score, scores_of(chat)))
    assert seen == [[("user", "a"), ("assistant", ""), ("tool", "c")]]


def test_a_request_waits_for_a_server_that_comes_later(tmp_path: Path) -> None:
    endpoint = endpoint_in(tmp_path)

    async def late() -> list[Any]:
        asking = asyncio.create_task(scores_of("x"))
        await asyncio.sleep(0)
        result: list[Any] = await serving(endpoint, lambda batch: [3.0] * len(batch), asking)
        return result

    assert asyncio.run(late()) == [3.0]


def test_a_request_that_is_none_of_a_scorers_is_refused(tmp_path: Path) -> None:
    endpoint = endpoint_in(tmp_path)

    async def ask() -> None:
        link = ClientLink(endpoint, "stranger", lambda: 0.0)
        try:
            await link.request(LeaseRequest(1))
        finally:
            link.close()

    with pytest.raises(WireError, match="expected a reward request, got LeaseRequest"):
        asyncio.run(serving(endpoint, lambda batch: [3.0] * len(batch), ask()))


def test_without_a_reward_model_the_reward_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"set reward_model\.name=FOLDER"):
        load_reward("model")
