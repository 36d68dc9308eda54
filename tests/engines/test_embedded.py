"""The embedded engine as actors use it: asyncio in front, one thread behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    Qwen3ForCausalLM,
)

from streamrl.engines.embedded import EmbeddedEngine
from streamrl.engines.model_runner import plan_scores
from streamrl.errors import ConfigError, DivergedError, WeightSyncError
from streamrl.loss.head import HeadForm
from streamrl.types import SamplingParams, expand_versions

Build = Callable[..., PreTrainedModel]
GREEDY = SamplingParams(temperature=0, max_tokens=20)


@asynccontextmanager
async def serving(
    model: PreTrainedModel,
    slots: int = 8,
    max_length: int = 128,
    kv: str = "keep",
    decode: Callable[[list[int]], str] | None = None,
) -> AsyncIterator[EmbeddedEngine]:
    engine = EmbeddedEngine(model, slots=slots, max_length=max_length, kv=kv, decode=decode)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def one_token_weights(model: PreTrainedModel, token: int) -> dict[str, torch.Tensor]:
    """Weights of an untied GPT-2 that always says ``token``: its last norm gives ones, its head likes one row."""
    tensors = weights(model)
    tensors["transformer.ln_f.weight"].zero_()
    tensors["transformer.ln_f.bias"].fill_(1)
    tensors["lm_head.weight"].zero_()[token] = 10
    return tensors


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 32, rng.integers(1, 15)).tolist() for _ in range(count)]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["qwen3", "llama", "gpt2"])
def test_greedy_tokens_equal_those_of_generate(build: Build, family: str, tied: bool) -> None:
    model = build(family, tied)
    asked = prompts(5)
    params = SamplingParams(temperature=0, max_tokens=60)

    async def run() -> list[list[int]]:
        async with serving(model, slots=4) as engine:
            answers = await asyncio.gather(*(engine.generate(prompt, params) for prompt in asked))
        return [answer.token_ids.tolist() for answer in answers]

    for prompt, answer in zip(asked, asyncio.run(run()), strict=True):
        ids = torch.tensor([prompt])
        settings = {"do_sample": False, "max_new_tokens": 60, "eos_token_id": None, "pad_token_id": 0}
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        assert answer == expected[0, len(prompt) :].tolist()


def test_recorded_logprobs_equal_an_independent_rescore_of_the_processed_distribution(build: Build) -> None:
    model = build()
    asked = prompts(12, seed=1)
    shapes = [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.2, 5, 1.0), (0.9, 0, 0.8), (1.1, 8, 0.7), (0.0, 0, 1.0)]
    params = [SamplingParams(*shapes[index % 6], max_tokens=15, seed=index) for index in range(12)]

    async def run() -> list[Any]:
        async with serving(model, slots=5) as engine:
            return await asyncio.gather(*map(engine.generate, asked, params))

    for prompt, how, answer in zip(asked, params, asyncio.run(run()), strict=True):
        tokens = prompt + answer.token_ids.tolist()
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([tokens])).logits[0, len(prompt) - 1 : -1].double().numpy()
        for row, token, logprob in zip(logits, answer.token_ids, answer.logprobs, strict=True):
            scaled = row / (how.temperature or 1.0)
            kept = np.argsort(-scaled)[: how.top_k or None]
            probabilities = np.exp(scaled[kept] - scaled.max())
            probabilities /= probabilities.sum()
            count = int(np.searchsorted(probabilities.cumsum(), how.top_p)) + 1
            nucleus = dict(zip(kept[:count].tolist(), probabilities[:count] / probabilities[:count].sum(), strict=True))
            assert logprob == pytest.approx(np.log(nucleus[int(token)]), abs=1e-5)


def test_what_else_is_in_the_batch_does_not_change_the_tokens_of_a_seed(build: Build) -> None:
    model = build()
    params = SamplingParams(max_tokens=25, seed=7)

    async def run(others: int) -> list[int]:
        async with serving(model, slots=6) as engine:
            noise = [
                engine.generate(prompt, SamplingParams(temperature=1.5, max_tokens=3 + index, seed=index))
                for index, prompt in enumerate(prompts(others))
            ]
            *_, answer = await asyncio.gather(*noise, engine.generate([1, 2, 3], params))
        return answer.token_ids.tolist()

    assert asyncio.run(run(0)) == asyncio.run(run(3)) == asyncio.run(run(20))


def test_updates_under_64_requests_lose_none_and_stamp_every_token_with_its_weights(build: Build) -> None:
    model = build("gpt2", tied=False)

    async def run(kv: str) -> tuple[list[Any], list[int]]:
        async with serving(model, slots=16, kv=kv) as engine:
            await engine.pause()
            await engine.load(0, one_token_weights(model, 0))
            await engine.resume()
            tasks = [
                asyncio.ensure_future(
                    engine.generate([5, 6, index % 7], SamplingParams(max_tokens=10 + index % 50, seed=index))
                )
                for index in range(64)
            ]
            version = 0
            while not all(task.done() for task in tasks):
                version = min(version + 1, 31)
                await engine.score([1, 2, 3])  # lets the core go on by at least a turn
                await engine.pause()
                await engine.load(version, one_token_weights(model, version))
                assert engine.version == version
                await engine.resume()
            return [task.result() for task in tasks], [10 + index % 50 for index in range(64)]

    for kv in ("keep", "recompute"):
        answers, lengths = asyncio.run(run(kv))
        assert [len(answer.token_ids) for answer in answers] == lengths
        for answer in answers:
            versions = expand_versions(answer.versions)
            assert answer.token_ids.tolist() == versions.tolist()
            assert (np.diff(versions) >= 0).all()
        assert max(len(answer.versions) for answer in answers) > 2, "the updates were in flight"


def test_a_group_that_is_asked_for_at_once_shares_one_prefill(build: Build) -> None:
    async def run() -> None:
        async with serving(build(), slots=16) as engine:
            params = [SamplingParams(max_tokens=5, seed=seed) for seed in range(8)]
            await asyncio.gather(*(engine.generate([1, 2, 3], each) for each in params))
            assert engine.statistics().prefilled_tokens == 3
            assert engine.statistics().generated_tokens == 40

    asyncio.run(run())


def test_a_paused_engine_keeps_its_requests_and_still_scores(build: Build) -> None:
    model = build()

    async def run() -> None:
        async with serving(model) as engine:
            await engine.pause()
            await engine.pause()
            request = asyncio.ensure_future(engine.generate([1, 2], GREEDY))
            scores = await engine.score([1, 2, 3])
            await engine.score([1, 2, 3])
            assert scores[0] == 0
            assert not request.done()
            assert (engine.statistics().waiting, engine.statistics().generated_tokens) == (1, 0)
            await engine.resume()
            await engine.resume()
            assert len((await request).token_ids) == 20

    asyncio.run(run())


def test_scores_are_log_softmax_of_the_models_logits_at_the_temperature(build: Build) -> None:
    model = build("llama", tied=False)
    tokens = prompts(1, seed=3)[0] + [4, 5]

    async def run() -> np.ndarray:
        async with serving(model) as engine:
            return await engine.score(tokens, temperature=0.7)

    scores = asyncio.run(run())
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens])).logits[0].double() / 0.7
    expected = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(tokens)[1:, None])[:, 0]
    np.testing.assert_allclose(scores[1:], expected, atol=1e-5)
    assert (scores.dtype, scores.shape, scores[0]) == (np.float32, (len(tokens),), 0)


def test_a_load_that_does_not_fit_is_refused_and_the_old_weights_serve_on(build: Build) -> None:
    model, other = build(seed=0), weights(build(seed=1))
    name = "model.layers.1.mlp.up_proj.weight"
    bad: list[tuple[dict[str, Any], str]] = [
        ({key: value for key, value in other.items() if key != name}, "missing"),
        (other | {"model.extra": torch.zeros(1)}, "unknown"),
        (other | {"lm_head.weight": other["model.embed_tokens.weight"]}, "tied weights once"),
        (other | {name: other[name].T.contiguous()}, name),
        (other | {name: other[name].double()}, name),
        (other | {name: other[name].numpy()}, name),
    ]

    async def run() -> None:
        async with serving(model) as engine:
            before = await engine.score([1, 2, 3, 4])
            with pytest.raises(WeightSyncError, match="pause"):
                await engine.load(0, other)
            await engine.pause()
            for tensors, message in bad:
                with pytest.raises(WeightSyncError, match=message):
                    await engine.load(0, tensors)
            await engine.resume()
            assert engine.version == -1
            assert (await engine.score([1, 2, 3, 4])).tolist() == before.tolist()
            assert (await engine.generate([1], GREEDY)).versions == [(-1, 20)]

    asyncio.run(run())


def test_loaded_tensors_are_served_from_where_they_lie(build: Build) -> None:
    model, first, second = build(seed=0), weights(build(seed=1)), weights(build(seed=2))

    async def run() -> None:
        async with serving(model) as engine:
            for version, tensors in enumerate((first, second, first)):
                await engine.pause()
                await engine.load(version, tensors)
                await engine.resume()
                held = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
                assert held == {name: tensor.data_ptr() for name, tensor in tensors.items()}
            assert (await engine.score([1, 2, 3, 4])).tolist() == alone.tolist()

    async def by_itself() -> np.ndarray:
        async with serving(build(seed=1)) as engine:
            return await engine.score([1, 2, 3, 4])

    alone = asyncio.run(by_itself())
    asyncio.run(run())


def test_the_head_runs_in_fp32_over_bf16_weights_and_follows_every_load(build: Build) -> None:
    model = build(hidden_size=64).to(torch.bfloat16)
    updated = weights(build(hidden_size=64, seed=1).to(torch.bfloat16))
    tokens = [1, 2, 3, 4, 5]

    async def run() -> np.ndarray:
        async with serving(model) as engine:
            await engine.pause()
            await engine.load(0, updated)
            await engine.resume()
            return await engine.score(tokens)

    scores = asyncio.run(run())
    with torch.no_grad():
        hidden = model.base_model(input_ids=torch.tensor([tokens])).last_hidden_state[0]
        logits = hidden.float() @ updated["model.embed_tokens.weight"].float().T
        rounded = (hidden @ updated["model.embed_tokens.weight"].T).float()
    expected, coarse = (
        x.log_softmax(-1)[:-1].gather(1, torch.tensor(tokens)[1:, None])[:, 0] for x in (logits, rounded)
    )
    np.testing.assert_allclose(scores[1:], expected, atol=1e-6)
    assert (expected - coarse).abs().max() > 1e-3, "the test can tell an fp32 head from a bf16 one"


def test_the_head_dtype_that_is_told_is_the_one_that_ran(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for float32; the head computes in bfloat16 all the same."""
    coarse = HeadForm(dtype=torch.bfloat16)
    monkeypatch.setattr("streamrl.engines.model_runner.HeadForm.of", lambda config, dtype: coarse)

    async def run() -> None:
        async with serving(build().to(torch.bfloat16)) as engine:
            assert engine.facts().head_dtype == "bfloat16"

    asyncio.run(run())


@pytest.mark.parametrize("family", ["granite", "cohere"])
def test_scaled_logits_are_served_as_the_model_defines_them(family: str) -> None:
    settings: dict[str, Any] = {
        "vocab_size": 32,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
        "initializer_range": 0.2,
    }
    torch.manual_seed(0)
    if family == "granite":
        model: PreTrainedModel = GraniteForCausalLM(GraniteConfig(**settings, logits_scaling=3.0))
    else:
        model = CohereForCausalLM(CohereConfig(**settings, logit_scale=0.3))

    async def run() -> np.ndarray:
        async with serving(model) as engine:
            return await engine.score([1, 2, 3, 4])

    scores = asyncio.run(run())
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[1, 2, 3, 4]])).logits[0]
    np.testing.assert_allclose(scores[1:], logits.log_softmax(-1)[[0, 1, 2], [2, 3, 4]], atol=1e-5)


def test_a_cancelled_request_frees_the_only_slot(build: Build) -> None:
    async def run() -> None:
        async with serving(build(), slots=1) as engine:
            endless = asyncio.ensure_future(engine.generate([1], SamplingParams(max_tokens=127)))
            queued = asyncio.ensure_future(engine.generate([2], GREEDY))
            unsent = asyncio.ensure_future(engine.generate([3], GREEDY))
            await engine.pause()
            endless.cancel()
            queued.cancel()
            await asyncio.gather(endless, queued, return_exceptions=True)
            await engine.resume()
            assert len((await unsent).token_ids) == 20
            assert (engine.statistics().running, engine.statistics().waiting) == (0, 0)

    asyncio.run(run())


def test_weights_that_are_not_finite_fail_the_requests_in_flight_and_every_later_call(build: Build) -> None:
    model = build()
    poisoned = {name: torch.full_like(tensor, torch.nan) for name, tensor in weights(model).items()}

    async def run() -> None:
        async with serving(model, slots=2) as engine:
            await engine.pause()
            tasks = [asyncio.ensure_future(engine.generate([1, index], GREEDY)) for index in range(5)]
            await engine.load(0, poisoned)
            await engine.resume()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(result, DivergedError) for result in results)
            for call in (
                engine.generate([1], GREEDY),
                engine.score([1]),
                engine.pause(),
                engine.load(1, weights(model)),
            ):
                with pytest.raises(DivergedError):
                    await call

    asyncio.run(run())


def test_an_exception_in_the_model_reaches_the_caller_as_it_is(build: Build) -> None:
    model = build()

    async def run() -> None:
        async with serving(model) as engine:

            def fail(*_: object) -> None:
                raise MemoryError("no room")

            model.base_model.register_forward_pre_hook(fail)
            with pytest.raises(MemoryError, match="no room"):
                await engine.score([1, 2])

    asyncio.run(run())


def test_an_answer_ends_with_its_stop_token_with_max_tokens_or_with_the_context(build: Build) -> None:
    model = build("gpt2", tied=False)

    async def run() -> None:
        async with serving(model, max_length=16) as engine:
            await engine.pause()
            await engine.load(0, one_token_weights(model, 9))
            await engine.resume()
            stop = SamplingParams(max_tokens=50, stop_token_ids=(3, 9))
            answer, limited, single, full = await asyncio.gather(
                engine.generate([1, 2], stop),
                engine.generate([1, 2], replace(stop, stop_token_ids=(3,), max_tokens=4)),
                engine.generate([1, 2], replace(stop, stop_token_ids=(), max_tokens=1)),
                engine.generate([1, 2], replace(stop, stop_token_ids=())),
            )
            assert (answer.token_ids.tolist(), answer.finish_reason) == ([9], "stop")
            assert (limited.token_ids.tolist(), limited.finish_reason) == ([9] * 4, "length")
            assert (single.token_ids.tolist(), single.finish_reason) == ([9], "length")
            assert (full.token_ids.tolist(), full.finish_reason) == ([9] * 14, "length")
            assert len((await engine.generate([1] * 15, stop)).token_ids) == 1
            again = await engine.generate([1, 2], SamplingParams(max_tokens=4))
            assert again.token_ids.tolist() == [9] * 4, "the stop tokens of a slot's last request are gone"

    asyncio.run(run())


def letters(token_ids: list[int]) -> str:
    """Two characters per token, so that a string may end in the middle of one."""
    return "".join(chr(97 + token) + "." for token in token_ids)


@pytest.mark.parametrize("slots", [1, 3, 12])
def test_an_answer_ends_with_the_token_that_completes_a_stop_string(build: Build, slots: int) -> None:
    model = build()
    free = [SamplingParams(max_tokens=40, seed=seed) for seed in range(12)]

    async def run() -> None:
        async with serving(model, slots=slots, decode=letters) as engine:
            whole = await asyncio.gather(*(engine.generate([1, 2], params) for params in free))
            texts = [letters(each.token_ids.tolist()) for each in whole]
            # from the middle of token 3 into token ``3 + seed``, or none where no stop string is asked for
            stops = [(texts[seed][7 : 8 + 2 * seed], "never") if seed % 3 else () for seed in range(12)]
            asked = [replace(params, stop_strings=stop) for params, stop in zip(free, stops, strict=True)]
            ended = await asyncio.gather(*(engine.generate([1, 2], params) for params in asked))
            for one, text, stop, answer in zip(whole, texts, stops, ended, strict=True):
                count = (text.find(stop[0]) + len(stop[0]) + 1) // 2 if stop else 40
                assert answer.token_ids.tolist() == one.token_ids[:count].tolist()
                np.testing.assert_allclose(answer.logprobs, one.logprobs[:count], atol=1e-5)
                assert (answer.finish_reason, answer.versions) == ("stop" if stop else "length", [(-1, count)])

    asyncio.run(run())


def test_a_stop_string_in_the_prompt_does_not_end_the_answer(build: Build) -> None:
    async def run() -> None:
        async with serving(build(), decode=letters) as engine:
            free = await engine.generate([1, 2, 3], GREEDY)
            stop = letters([3, int(free.token_ids[0])])
            assert stop not in letters(free.token_ids.tolist())
            again = await engine.generate([1, 2, 3], replace(GREEDY, stop_strings=(stop,)))
            assert again.token_ids.tolist() == free.token_ids.tolist()

    asyncio.run(run())


def test_a_string_that_is_completed_by_the_last_token_allowed_is_a_stop(build: Build) -> None:
    async def run() -> None:
        async with serving(build(), decode=letters) as engine:
            free = await engine.generate([1, 2, 3], replace(GREEDY, max_tokens=3))
            params = replace(GREEDY, max_tokens=3, stop_strings=(letters(free.token_ids.tolist()),))
            assert (await engine.generate([1, 2, 3], params)).finish_reason == "stop"

    asyncio.run(run())


def test_a_character_of_several_tokens_completes_a_stop_string(build: Build) -> None:
    """Each token is one byte, as with a byte-level tokenizer; the stop string is one character of three bytes."""
    model, params = build(), SamplingParams(max_tokens=12, seed=1)

    async def run() -> None:
        async with serving(model) as engine:
            said = (await engine.generate([1], params)).token_ids.tolist()
        three = said[6:9]
        assert len(set(three)) == 3, "the tokens tell the bytes apart"
        spelled = dict(zip(three, "€".encode(), strict=True))

        def decode(token_ids: list[int]) -> str:
            return bytes(spelled.get(token, 65) for token in token_ids).decode(errors="replace")

        assert "€" not in decode(said[:8])
        async with serving(model, decode=decode) as engine:
            answer = await engine.generate([1], replace(params, stop_strings=("€",)))
            assert (answer.token_ids.tolist(), answer.finish_reason) == (said[:9], "stop")

    asyncio.run(run())


def test_stop_strings_need_a_tokenizer(build: Build) -> None:
    async def run() -> None:
        async with serving(build()) as engine:
            with pytest.raises(ValueError, match="stop_strings need an engine that was given its tokenizer's decode"):
                await engine.generate([1], replace(GREEDY, stop_strings=("a",)))

    asyncio.run(run())


@pytest.mark.parametrize(
    ("prompt", "changes", "message"),
    [
        ([], {}, "1 to 15 tokens, got 0"),
        ([1] * 16, {}, "1 to 15 tokens, got 16"),
        ([1, 32], {}, "token ids"),
        ([-1], {}, "token ids"),
        ([1], {"temperature": -1.0}, "temperature"),
        ([1], {"top_k": -1}, "top_k"),
        ([1], {"top_p": 0.0}, "top_p"),
        ([1], {"max_tokens": 0}, "max_tokens"),
        ([1], {"stop_strings": ("a", "")}, "stop_strings must not be empty"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(
    build: Build, prompt: list[int], changes: dict[str, Any], message: str
) -> None:
    async def run() -> None:
        async with serving(build(), max_length=16) as engine:
            with pytest.raises(ValueError, match=message):
                await engine.generate(prompt, replace(GREEDY, **changes))
            assert engine.statistics().waiting == 0

    asyncio.run(run())


def test_close_cancels_what_is_in_flight_and_leaves_no_thread(build: Build) -> None:
    before = set(threading.enumerate())

    async def run() -> None:
        engine = EmbeddedEngine(build(), slots=2, max_length=200)
        await engine.start()
        await engine.pause()
        tasks = [asyncio.ensure_future(engine.generate([1], SamplingParams(max_tokens=100))) for _ in range(5)]
        await engine.score([1, 2])
        await engine.close()
        await engine.close()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        with pytest.raises(RuntimeError, match="closed"):
            await engine.generate([1], GREEDY)

    asyncio.run(run())
    assert set(threading.enumerate()) == before


def test_an_engine_that_was_never_started_closes_and_refuses_calls(build: Build) -> None:
    async def run() -> None:
        engine = EmbeddedEngine(build(), slots=2, max_length=64)
        with pytest.raises(RuntimeError, match="start"):
            await engine.generate([1], GREEDY)
        await engine.close()

    asyncio.run(run())


class DoubledLogits(Qwen3ForCausalLM):
    """A model whose logits are not simply its head's."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = 2 * output.logits
        return output


def test_models_that_cannot_be_served_exactly_are_refused(build: Build) -> None:
    def engine(model: PreTrainedModel, **changes: Any) -> EmbeddedEngine:
        return EmbeddedEngine(model, **({"slots": 2, "max_length": 64} | changes))

    with pytest.raises(ConfigError, match="sliding_attention"):
        engine(build(layer_types=["full_attention", "sliding_attention"], use_sliding_window=True, sliding_window=8))
    with pytest.raises(ConfigError, match="linear_attention"):
        engine(MambaForCausalLM(MambaConfig(vocab_size=32, hidden_size=32, num_hidden_layers=1)))
    with pytest.raises(ConfigError, match="256 positions"):
        engine(build(), max_length=257)
    with pytest.raises(ConfigError, match="'keep' or 'recompute'"):
        engine(build(), kv="drop")
    with pytest.raises(ConfigError, match="at least 1"):
        engine(build(), slots=0)
    with pytest.raises(ConfigError, match="'float32' or 'bfloat16', got 'float64'"):
        engine(build(), head_dtype="float64")
    unusual = build()
    unusual.__class__ = DoubledLogits

    async def start(model: PreTrainedModel) -> None:
        started = engine(model)
        try:
            await started.start()
        finally:
            await started.close()

    with pytest.raises(ConfigError, match="DoubledLogits.*differ"):
        asyncio.run(start(unusual))
    sizes = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    alibi = FalconConfig(**sizes, alibi=True, max_position_embeddings=64)
    with pytest.raises(ConfigError, match="Falcon"):
        asyncio.run(start(FalconForCausalLM(alibi)))


def test_many_scores_at_once_are_those_of_each_row_alone(build: Build) -> None:
    model = build()
    rows = [*prompts(5, seed=1), [3], [4, 2]]

    async def run() -> tuple[list[np.ndarray], list[np.ndarray]]:
        async with serving(model) as engine:
            alone = [await engine.score(row, 0.7 + 0.1 * (index % 2)) for index, row in enumerate(rows)]
            scoring = [engine.score(row, 0.7 + 0.1 * (index % 2)) for index, row in enumerate(rows)]
            return alone, await asyncio.gather(*scoring)

    for alone, together in zip(*asyncio.run(run()), strict=True):
        np.testing.assert_allclose(together, alone, atol=1e-6)


def test_a_cancelled_score_leaves_those_beside_it_alone(build: Build) -> None:
    async def run() -> None:
        async with serving(build()) as engine:
            tasks = [asyncio.ensure_future(engine.score([1, 2, 3])) for _ in range(2)]
            await asyncio.sleep(0)
            tasks[0].cancel()
            assert (await tasks[1]).tolist() == (await engine.score([1, 2, 3])).tolist()

    asyncio.run(run())


def test_rows_of_about_the_same_length_share_a_pass_of_bounded_size() -> None:
    assert plan_scores([5, 1, 9, 2, 4, 30], 12) == [[1, 3, 4], [0], [2], [5]]
    assert plan_scores([], 12) == []
