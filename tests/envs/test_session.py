"""The transcript is token-exact: what was sampled, by which version, with which log-probability."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from scripted import END, PAIR, CharTokenizer, ScriptedEngine, generation, ids, says

from streamrl.envs import memory
from streamrl.envs.codec import Codec
from streamrl.envs.environment import Reward
from streamrl.envs.episode import ContextFull, Episode, Limits, turn_seed
from streamrl.envs.session import Session
from streamrl.types import Generation, Trajectory

LIMITS = Limits(temperature=0.7, top_k=0, top_p=1.0, max_tokens=8, max_length=20)


def session(engine: ScriptedEngine, limits: Limits = LIMITS, tokenizer: CharTokenizer | None = None) -> Session:
    return Session(Episode(engine, Codec(tokenizer or CharTokenizer()), limits, (0, 0, 0, 0)))  # type: ignore[arg-type]


def only(policy: Session, reward: Reward | None = None) -> Trajectory:
    """The one trajectory of an episode that never branched."""
    (trajectory,) = policy.episode.trajectories(reward or Reward(0.0), member=3)
    return trajectory


def test_two_turns_record_tokens_masks_log_probs_and_versions_exactly() -> None:
    answers = [
        generation([*ids("1"), PAIR, END], versions=[(3, 1), (4, 2)], logprobs=[-0.25, -1.5, -0.125]),
        generation(ids("7$"), versions=[(4, 1), (6, 1)], logprobs=[-2.0, -0.0625]),
    ]
    engine = ScriptedEngine(lambda *_: answers[len(engine.requests) - 1])
    policy = session(engine)

    async def episode() -> list[str]:
        first = await policy.complete("5+2=")
        second = await policy.complete("<")
        assert first.token_ids == (1, PAIR, END) and second.finish_reason == "stop"
        return [first.text, second.text]

    assert asyncio.run(episode()) == ["1ab", "7"]
    trajectory = only(policy, Reward(0.5, {"hints": 1.0}))
    assert trajectory.tokens.tolist() == [*ids("5+2="), 1, PAIR, END, *ids("<7$")]
    assert trajectory.sampled.tolist() == [False] * 4 + [True] * 3 + [False] + [True] * 2
    assert trajectory.behaviour.tolist() == [0, 0, 0, 0, -0.25, -1.5, -0.125, 0, -2.0, -0.0625]
    assert trajectory.versions == [(3, 1), (4, 3), (6, 1)]
    assert (trajectory.reward, trajectory.turns, trajectory.metrics) == (0.5, 2, {"hints": 1.0})
    assert not trajectory.truncated
    assert [trajectory.tokens.dtype, trajectory.sampled.dtype, trajectory.behaviour.dtype] == [
        np.dtype(np.int32),
        np.dtype(np.bool_),
        np.dtype(np.float32),
    ]


def test_the_second_request_carries_the_tokens_as_sampled_and_not_their_text_encoded_again() -> None:
    engine = ScriptedEngine(lambda *_: generation([PAIR, END]))
    tokenizer = CharTokenizer()
    policy = session(engine, tokenizer=tokenizer)

    async def episode() -> None:
        await policy.complete("1=")
        await policy.complete("<")

    asyncio.run(episode())
    assert engine.requests[1][0] == [*ids("1="), PAIR, END, *ids("<")]
    assert tokenizer.encoded == ["1=", "<"]


def test_a_turn_samples_with_the_runs_settings_and_stops_at_the_end_token() -> None:
    engine = says("1$")
    asyncio.run(session(engine).complete("1="))
    _, params = engine.requests[0]
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.7, 0, 1.0, 8)
    assert params.stop_token_ids == (END,)


def test_stop_strings_of_any_length_go_to_the_engine_and_are_cut_from_the_text() -> None:
    engine = says("1+2<>3$")
    policy = session(engine)
    completion = asyncio.run(policy.complete("1=", stop=["<>", "."]))
    assert (engine.requests[0][1].stop_token_ids, engine.requests[0][1].stop_strings) == ((END,), ("<>", "."))
    assert (completion.text, completion.token_ids) == ("1+2", tuple(ids("1+2<>3$")))


def test_a_stop_string_that_is_a_special_token_is_stopped_at_by_its_id() -> None:
    class Special(CharTokenizer):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [END] if text == "$" else super().encode(text, add_special_tokens)

    engine = says("1$")
    asyncio.run(session(engine, tokenizer=Special()).complete("1=", stop="$"))
    assert (engine.requests[0][1].stop_token_ids, engine.requests[0][1].stop_strings) == ((END,), ())


@pytest.mark.parametrize(
    ("stop", "message"), [("", "at least one character"), ("~", "would never be sampled"), ([3], "expected a string")]
)
def test_a_stop_string_that_cannot_be_sampled_is_refused(stop: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        asyncio.run(session(says("1$")).complete("1=", stop=stop))


def test_a_stop_string_that_the_tokenizer_reads_as_an_unknown_token_is_refused() -> None:
    class Lossy(CharTokenizer):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return super().encode("?" if text == "~" else text, add_special_tokens)

    with pytest.raises(ValueError, match="would never be sampled"):
        asyncio.run(session(says("1$"), tokenizer=Lossy()).complete("1=", stop="~"))


def test_texts_are_encoded_once_but_for_those_that_are_too_long_to_be_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "CHARACTERS", 4)
    tokenizer = CharTokenizer()
    policy = session(says("1$"), replace(LIMITS, max_length=100), tokenizer)

    async def episode() -> None:
        for text in ("1234", "12345") * 2:
            await policy.complete(text)

    asyncio.run(episode())
    assert tokenizer.encoded == ["1234", "12345", "12345"]


def test_max_tokens_lowers_the_runs_limit_and_never_raises_it() -> None:
    engine = says("1$")
    asyncio.run(session(engine).complete("1=", max_tokens=3))
    asyncio.run(session(engine).complete("1=", max_tokens=300))
    assert [params.max_tokens for _, params in engine.requests] == [3, 8]


def test_max_tokens_shrinks_to_the_room_in_the_context() -> None:
    engine = says("1")
    policy = session(engine)
    asyncio.run(policy.complete("1" * 15))
    assert engine.requests[0][1].max_tokens == 5
    assert only(policy).truncated


def test_a_full_context_raises_once_and_leaves_the_transcript_as_it_was() -> None:
    policy = session(says("12345$"))

    async def episode() -> None:
        await policy.complete("1" * 13)
        with pytest.raises(ContextFull, match=r"20 tokens leave no room to sample in model\.max_length=20"):
            await policy.complete("<")

    asyncio.run(episode())
    trajectory = only(policy)
    assert trajectory.tokens.tolist() == ids("1" * 13 + "12345$")
    assert trajectory.truncated


def test_a_call_that_fails_leaves_the_transcript_as_it_was_and_can_be_made_again() -> None:
    def answer(*_: object) -> Generation:
        if len(engine.requests) == 2:
            raise OSError("lost")
        return generation(ids("1$"))

    engine = ScriptedEngine(answer)
    policy = session(engine)

    async def episode() -> None:
        await policy.complete("1=")
        with pytest.raises(OSError, match="lost"):
            await policy.complete("<")
        await policy.complete(">")

    asyncio.run(episode())
    assert only(policy).tokens.tolist() == ids("1=1$>1$")
    assert engine.requests[1][1].seed == engine.requests[2][1].seed


def test_two_calls_at_once_are_refused() -> None:
    async def episode() -> None:
        engine = says("1$")
        engine.hold = asyncio.Event()
        policy = session(engine)
        first = asyncio.create_task(policy.complete("1="))
        await engine.started.wait()
        with pytest.raises(RuntimeError, match="another call is under way"):
            await policy.complete("2=")
        engine.hold.set()
        assert (await first).text == "1"

    asyncio.run(episode())


def test_a_call_after_the_episode_is_refused() -> None:
    policy = session(says("1$"))
    assert policy.episode.close()
    with pytest.raises(RuntimeError, match="the episode has ended"):
        asyncio.run(policy.complete("1="))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the transcript is empty"),
        ("~~", "has no token for any part of '~~'"),
        (3, "must be str or token ids, got 3"),
    ],
)
def test_a_text_that_cannot_start_a_transcript_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        asyncio.run(session(says("1$")).complete(text))


@pytest.mark.parametrize("max_tokens", [0, -1, 2.5])
def test_max_tokens_must_be_a_positive_whole_number(max_tokens: int) -> None:
    with pytest.raises(ValueError, match=f"max_tokens={max_tokens} must be a whole number"):
        asyncio.run(session(says("1$")).complete("1=", max_tokens=max_tokens))


def test_seeds_differ_in_every_argument_and_are_the_same_for_ever() -> None:
    base = (1, 2, 3, 4, 5)
    changed = [tuple(value + (place == at) for place, value in enumerate(base)) for at in range(5)]
    seeds = {turn_seed(*key) for key in [base, *changed]}
    assert len(seeds) == 6
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert turn_seed(0, 0, 0, 0, 0) == 623449399944981844


def test_a_transformers_tokenizer_fits(tmp_path: object) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {character: place for place, character in enumerate("0123456789+=<>")} | {"<end>": 14, "<unk>": 15}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", unk_token="<unk>")
    engine = ScriptedEngine(lambda *_: generation([4, 6, 14]))
    policy = Session(Episode(engine, Codec(tokenizer), LIMITS, (0, 0, 0, 0)))  # type: ignore[arg-type]
    assert asyncio.run(policy.complete("12+34=")).text == "46"
    assert engine.requests[0] == ([1, 2, 10, 3, 4, 11], engine.requests[0][1])
    assert engine.requests[0][1].stop_token_ids == (14,)
    with pytest.raises(ValueError, match="would never be sampled"):
        asyncio.run(policy.complete("<", stop="~"))
