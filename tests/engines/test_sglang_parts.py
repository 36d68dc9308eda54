"""What is said to SGLang's server and what is made of its answers, without one. The server itself: ``tests/real``."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conformance_model import distribution
from sglang_support import ABLE, Recorded, answer, engine_over

from streamrl.config import load_config
from streamrl.engines.sglang.arguments import arguments, bare_model, flags
from streamrl.engines.sglang.processor import HEAD_DTYPES, HEAD_PROBE, Processor, wanted
from streamrl.engines.sglang.requests import Abilities, generation, request
from streamrl.engines.sglang.server import SglangServer
from streamrl.engines.sglang.weights import BUCKET_BYTES, buckets
from streamrl.errors import ActorDied, ConfigError, DivergedError
from streamrl.types import SamplingParams

PROMPT, SAID = [3, 4, 5, 3], [6, 6, 1]


def processed(logits: torch.Tensor, asked: list[SamplingParams]) -> torch.Tensor:
    req = SimpleNamespace(origin_input_ids=PROMPT, output_ids=SAID)
    told = [wanted(params) for params in asked]
    return Processor()(logits, [{**each, "__req__": req} for each in told if each is not None])


def test_the_processor_leaves_the_reference_distribution_to_each_row_of_a_mixed_batch() -> None:
    asked = [
        SamplingParams(temperature=0.5, top_k=4),
        SamplingParams(temperature=1.3, top_k=6, top_p=0.7, min_p=0.02),
        SamplingParams(temperature=0.8, repetition_penalty=1.5, presence_penalty=0.3, frequency_penalty=-0.4),
        SamplingParams(temperature=0, repetition_penalty=0.7),
        SamplingParams(temperature=2.0, top_p=0.6, frequency_penalty=0.9),
    ]
    logits = 3 * torch.randn((len(asked), 12), generator=torch.Generator().manual_seed(0))
    for row, params, kept in zip(logits, asked, processed(logits.clone(), asked), strict=True):
        expected, _ = distribution(row.double().numpy(), PROMPT, SAID, params)
        found = (kept.double() / (params.temperature or 1.0)).log_softmax(0).numpy()
        np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0, top_k=3, top_p=0.5, min_p=0.2)])
def test_sglang_samples_alone_where_nothing_is_truncated_or_penalised(params: SamplingParams) -> None:
    body = request("r", PROMPT, params, 10, 104, ABLE)
    assert "custom_logit_processor" not in body
    assert "return_sampling_mask" not in body


@pytest.mark.parametrize("dtype", HEAD_DTYPES)
def test_the_probe_tells_the_narrowest_dtype_that_holds_the_logits(dtype: torch.dtype) -> None:
    logits = torch.randn((1, 50), generator=torch.Generator().manual_seed(1)).to(dtype).float()
    assert HEAD_DTYPES[int(Processor()(logits, [HEAD_PROBE]).argmax())] == dtype


def test_a_request_names_its_own_end_and_never_sglangs() -> None:
    body = request("r", PROMPT, SamplingParams(max_tokens=50, stop_token_ids=(7,)), 10, 104, ABLE)["sampling_params"]
    assert (body["stop_token_ids"], body["ignore_eos"], body["max_new_tokens"]) == ([7], False, 10)
    assert request("r", PROMPT, SamplingParams(), 10, 104, ABLE)["sampling_params"]["ignore_eos"]


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        (SamplingParams(top_k=3, top_p=0.9), "top-p"),
        (SamplingParams(min_p=0.1, top_p=0.9), "top-p"),
        (SamplingParams(presence_penalty=0.1), "penalties"),
        (SamplingParams(top_p=0.9), "top_k=100, got 104"),
    ],
)
def test_a_server_without_the_processor_is_not_asked_for_what_it_means_otherwise(
    params: SamplingParams, reason: str
) -> None:
    unable = Abilities(processes=False, overlaps=False, caches=False, masks=100, copies=1, loads_memory=False)
    with pytest.raises(ValueError, match=f"{reason}.*--enable-custom-logit-processor"):
        request("r", PROMPT, params, 10, 104, unable)


def test_penalties_are_refused_where_the_sampler_runs_ahead_and_truncation_is_not() -> None:
    ahead = Abilities(processes=True, overlaps=True, caches=False, masks=100, copies=1, loads_memory=False)
    with pytest.raises(ValueError, match="async_scheduling=false"):
        request("r", PROMPT, SamplingParams(repetition_penalty=1.1), 10, 104, ahead)
    assert "custom_logit_processor" in request("r", PROMPT, SamplingParams(top_k=3), 10, 104, ahead)


def test_a_temperature_that_sglang_takes_for_greedy_is_refused() -> None:
    with pytest.raises(ValueError, match="takes it for 0"):
        request("r", PROMPT, SamplingParams(temperature=1e-7), 10, 104, ABLE)


def read(given: dict[str, Any], params: SamplingParams | None = None) -> Any:
    return generation(given, params or SamplingParams(), lambda ids: "".join(map(chr, ids)), "here")


def test_an_answer_becomes_tokens_logprobs_and_versions() -> None:
    found = read(answer([5, 6, 7], {"type": "length"}, [("3", 0, 2), ("4", 2, 3)]))
    assert found.token_ids.tolist() == [5, 6, 7]
    assert found.logprobs.tolist() == [-2.5, -3.0, -3.5]
    assert (found.versions, found.finish_reason) == ([(3, 2), (4, 1)], "length")


def test_an_answer_ends_with_the_token_that_completes_a_stop_string_that_sglang_missed() -> None:
    tokens = [ord(letter) for letter in "xabcy"]
    params = SamplingParams(stop_strings=("zz", "abc"))
    found = read(answer(tokens, {"type": "length"}, [("3", 0, 3), ("4", 3, 5)]), params)
    assert (found.token_ids.tolist(), found.finish_reason) == (tokens[:4], "stop")
    assert (len(found.logprobs), found.versions) == (4, [(3, 3), (4, 1)])


@pytest.mark.parametrize(
    ("reason", "spans", "kind", "message"),
    [
        ({"type": "abort", "message": "out of memory"}, [("3", 0, 2)], ActorDied, "out of memory"),
        ({"type": "stop", "matched": "NaN happened"}, [("3", 0, 2)], DivergedError, "not finite"),
        ({"type": "stop", "matched": 2}, [("3", 0, 2)], ValueError, "its own end token 2"),
        ({"type": "length"}, [("default", 0, 2)], ActorDied, "somebody else"),
        ({"type": "length"}, [("3", 0, 1)], ActorDied, "somebody else"),
    ],
)
def test_an_answer_that_cannot_be_trusted_is_refused(
    reason: dict[str, Any], spans: list[tuple[str, int, int]], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        read(answer([5, 6], reason, spans))


def test_buckets_keep_their_order_and_bound_and_a_large_tensor_has_one_of_its_own() -> None:
    sizes = [BUCKET_BYTES // 2, BUCKET_BYTES // 2, 1, BUCKET_BYTES + 4, 8]
    named = [(str(index), torch.empty(size, dtype=torch.uint8)) for index, size in enumerate(sizes)]
    assert [[name for name, _ in bucket] for bucket in buckets(named)] == [["0", "1"], ["2"], ["3"], ["4"]]


def test_the_server_gets_a_model_without_weights_and_without_any_end_token(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    (source / "config.json").write_text(
        json.dumps({"eos_token_id": [1, 2], "text_config": {"eos_token_id": 1, "a": 3}})
    )
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": "$", "pad_token": "_"}))
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    (source / "tokenizer.json").write_text("{}")
    (source / "model.safetensors").write_bytes(b"weights")
    bare_model(source, target)
    read_back = {path.name: json.loads(path.read_text()) for path in target.iterdir()}
    assert read_back == {
        "config.json": {"eos_token_id": None, "text_config": {"eos_token_id": None, "a": 3}},
        "tokenizer_config.json": {"eos_token": None, "pad_token": "_"},
        "tokenizer.json": {},
    }


def test_flags_follow_the_settings_and_further_arguments_pass_through(tmp_path: Path) -> None:
    config = load_config(
        overrides=[
            "engine=sglang",
            "model.dtype=bfloat16",
            "engine.slots=7",
            "model.max_length=100",
            "engine.args.chunked-prefill-size=64",
            "engine.args.enable_mixed_chunk=true",
            "engine.args.max_total_tokens=500",
        ]  # fmt: skip
    )
    line = flags(arguments(config, tmp_path, accelerated=False))
    for flag in ("--chunked-prefill-size=64", "--enable-mixed-chunk", "--max-total-tokens=500", "--dtype=bfloat16",
                 "--max-running-requests=7", "--enable-fp32-lm-head", "--disable-overlap-schedule",
                 "--disable-radix-cache", "--device=cpu", "--load-format=dummy"):  # fmt: skip
        assert flag in line
    on_a_gpu = flags(arguments(config, tmp_path, accelerated=True))
    assert not any(flag.startswith(("--device", "--attention-backend")) for flag in on_a_gpu)
    assert "--disable-overlap-schedule" in on_a_gpu


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["engine.args.dtype=bfloat16"], "engine.args.dtype.*model.dtype"),
        (["engine.args.tensor-parallel-size=2"], "tensor-parallel-size.*engine.tensor_parallel"),
        (["engine.args.port=3000"], "engine.args.port.*remove it"),
        (["engine.async_scheduling=true"], "engine.kv=recompute"),
        (["engine.data_parallel=2"], "engine.data_parallel=1"),
        (["engine.urls=[http://localhost:1]", "engine.python=/bin/true"], "engine.python.*engine.urls"),
        (["engine.urls=[http://localhost:1,http://localhost:1/]"], "names a server twice"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_with_the_way_out(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(overrides=["engine=sglang", *overrides])


@pytest.mark.parametrize("caches", [True, False])
def test_whatever_may_read_the_prefix_cache_has_the_key_of_the_serving_weights(caches: bool) -> None:
    client = Recorded()

    async def run() -> None:
        engine = engine_over(client, caches=caches)
        await engine.generate([9, 10, 11], SamplingParams(max_tokens=1))
        await engine.score([9, 10, 11])
        await engine.score([9, 10, 11], 0.7)
        assert [body.get("extra_key") for body in client.generated()] == [engine._calls.salt if caches else None] * 3

    asyncio.run(run())


def test_a_request_that_waited_for_an_update_waits_for_the_next_one_that_follows_at_once() -> None:
    client = Recorded()

    async def run() -> None:
        engine = engine_over(client, caches=True)
        await engine.pause()
        task = asyncio.create_task(engine.generate([9, 10, 11], SamplingParams(max_tokens=1)))
        await asyncio.wait([task], timeout=0.05)  # nothing to wait for: that nothing happens is the point
        await engine.resume()
        engine._calls.pause()  # as ``pause`` does first
        await asyncio.wait([task], timeout=0.05)
        assert client.generated() == []
        engine._calls.resume()
        await task

    asyncio.run(run())


def test_the_servers_files_lie_in_the_folder_of_the_run(tmp_path: Path) -> None:
    """A script in the place of the interpreter writes down where it may put files."""
    for name in ("model", "scratch"):
        (tmp_path / name).mkdir()
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nprintf %s "$TMPDIR" > {tmp_path}/seen\nexit 3\n')
    script.chmod(0o700)
    config = load_config(overrides=["engine=sglang", f"engine.python={script}"])
    with pytest.raises(ActorDied, match="exit code 3"):
        asyncio.run(SglangServer.start(config, str(tmp_path / "model"), str(tmp_path / "scratch")))
    assert Path((tmp_path / "seen").read_text()).parent == tmp_path / "scratch"
    assert list((tmp_path / "scratch").iterdir()) == []
