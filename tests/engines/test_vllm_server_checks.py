"""A vLLM server that cannot serve a run is refused in one line that says how to start it. Needs no vLLM."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from streamrl.config import load_config
from streamrl.engines.http_client import ServerClient
from streamrl.engines.vllm.server_checks import GENERATE, KV_USED, PREEMPTIONS, checked_info, gauges
from streamrl.engines.vllm.server_engine import generation
from streamrl.errors import ActorDied, ConfigError

INFO: dict[str, Any] = {
    "vllm_config": {
        "model_config": {
            "dtype": "torch.float32", "hf_overrides": {"head_dtype": "float32"}, "max_model_len": 257,
            "logprobs_mode": "processed_logprobs",
        },
        "scheduler_config": {"max_num_seqs": 16, "async_scheduling": False},
        "parallel_config": {
            "worker_extension_cls": "streamrl.engines.vllm.worker.WorkerExtension", "data_parallel_size": 1,
        },
        "weight_transfer_config": {"backend": "streamrl"},
        "speculative_config": None,
    },
    "vllm_env": {"VLLM_USE_V2_MODEL_RUNNER": False},
}  # fmt: skip
METRICS = f'# HELP {KV_USED} x\n{KV_USED}{{engine="0"}} 0.25\n{PREEMPTIONS}{{engine="0"}} 3.0\n'
EVERY_FLAG = (
    '--dtype float32 --hf-overrides \'{"head_dtype": "float32"}\' --logprobs-mode processed_logprobs '
    "--max-model-len 257 --max-num-seqs 16 --no-async-scheduling "
    "--worker-extension-cls streamrl.engines.vllm.worker.WorkerExtension "
    '--weight-transfer-config \'{"backend": "streamrl"}\''
)


def refusal(
    info: dict[str, Any] | None = INFO, metrics: str = METRICS, generates: int = 400, adapted: tuple[str, ...] = ()
) -> str:
    """What a server is refused with that answers so; empty: it is not. ``info`` of None: not in development mode."""
    config = load_config(overrides=["engine=vllm", "engine.slots=16", "model.max_length=256"])
    config.model.lora.rank = 9 if adapted else 0

    async def run() -> None:
        async def told(request: web.Request) -> web.StreamResponse:
            return web.json_response(info, status=404 if info is None else 200)

        async def measured(request: web.Request) -> web.StreamResponse:
            return web.Response(text=metrics)

        async def generated(request: web.Request) -> web.StreamResponse:
            return web.json_response({"error": {"message": "no"}}, status=generates)

        app = web.Application()
        app.add_routes([web.get("/server_info", told), web.get("/metrics", measured), web.post(GENERATE, generated)])
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        client = ServerClient("vLLM", f"http://127.0.0.1:{runner.addresses[0][1]}", "", key_statuses=(401,))
        try:
            await checked_info(client, config, adapted)
        finally:
            await client.close()
            await runner.cleanup()

    try:
        asyncio.run(run())
    except ConfigError as error:
        assert "\n" not in str(error)
        return str(error)
    return ""


def test_a_server_with_all_that_a_run_needs_is_taken():
    assert refusal() == ""


@pytest.mark.parametrize(
    ("section", "name", "value", "flag"),
    [
        ("model_config", "dtype", "torch.bfloat16", "--dtype float32"),
        ("model_config", "hf_overrides", {}, "--hf-overrides '{\"head_dtype\": \"float32\"}'"),
        ("model_config", "max_model_len", 256, "--max-model-len 257"),
        ("model_config", "logprobs_mode", "raw_logprobs", "--logprobs-mode processed_logprobs"),
        ("scheduler_config", "max_num_seqs", 15, "--max-num-seqs 16"),
        ("scheduler_config", "async_scheduling", True, "--no-async-scheduling"),
        ("parallel_config", "worker_extension_cls", "",
         "--worker-extension-cls streamrl.engines.vllm.worker.WorkerExtension"),
        ("weight_transfer_config", "backend", "nccl", "--weight-transfer-config '{\"backend\": \"streamrl\"}'"),
        ("parallel_config", "data_parallel_size", 2, "--data-parallel-size 1, one server per copy"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_with_the_flag_that_rights_it(section: str, name: str, value: object, flag: str):
    info = copy.deepcopy(INFO)
    info["vllm_config"][section][name] = value
    assert refusal(info).endswith(f"start it with {flag}")


def with_adapters(**changes: object) -> dict[str, Any]:
    info = copy.deepcopy(INFO)
    info["vllm_env"]["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = True
    info["vllm_config"]["load_config"] = {"load_format": "auto"}
    room = {"max_loras": 1, "max_lora_rank": 16, "target_modules": ["q_proj", "down_proj"]}
    info["vllm_config"]["lora_config"] = room | changes
    return info


def test_a_server_for_adapters_has_the_base_room_for_the_rank_and_just_the_layers():
    adapted = ("down_proj", "q_proj")
    assert refusal(with_adapters(), adapted=adapted) == ""
    assert refusal(with_adapters(max_lora_rank=8), adapted=adapted).endswith("start it with --max-lora-rank 16")
    every = with_adapters(target_modules=None)
    every["vllm_config"]["load_config"]["load_format"] = "dummy"
    assert refusal(every, adapted=adapted).endswith(
        "start it with --lora-target-modules down_proj q_proj --load-format auto"
    )
    assert refusal(INFO, adapted=adapted).endswith(
        "start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 --enable-lora --max-lora-rank 16 "
        "--lora-target-modules down_proj q_proj --load-format auto"
    )
    assert refusal(with_adapters()).endswith("start it without --enable-lora")


def test_everything_that_is_missing_is_said_at_once():
    info = copy.deepcopy(INFO)
    info["vllm_env"] = {}
    info["vllm_config"]["weight_transfer_config"] = None
    info["vllm_config"]["model_config"]["logprobs_mode"] = "raw_logprobs"
    assert refusal(info, generates=403).endswith(
        "it lacks what a run needs; start it with VLLM_USE_V2_MODEL_RUNNER=0 --logprobs-mode processed_logprobs "
        '--weight-transfer-config \'{"backend": "streamrl"}\' --enable-scale-out'
    )


def test_a_server_that_tells_nothing_is_refused_with_every_flag():
    assert refusal(None).endswith(
        f"start it with VLLM_SERVER_DEV_MODE=1 VLLM_USE_V2_MODEL_RUNNER=0 {EVERY_FLAG} --enable-scale-out"
    )


def test_speculation_another_key_and_missing_statistics_are_refused():
    info = copy.deepcopy(INFO)
    info["vllm_config"]["speculative_config"] = {"method": "ngram"}
    assert refusal(info).endswith("start it without --speculative-config")
    assert refusal(metrics="").endswith("start it without --disable-log-stats")
    assert "wants another key" in refusal(generates=401)


def test_gauges_are_the_fullest_cache_and_all_preemptions():
    text = METRICS + f'{KV_USED}{{engine="1"}} 0.5\n{PREEMPTIONS}{{engine="1"}} 4.0\n'
    assert gauges(text) == {KV_USED: 0.5, PREEMPTIONS: 7.0}


def answer(**changes: object) -> dict[str, Any]:
    choice = {
        "token_ids": [5, 6, 7], "finish_reason": "length",
        "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -1.0}, {"logprob": -1.5}]},
        "weight_versions": [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 3}],
    }  # fmt: skip
    return {"request_id": "r", "choices": [choice | changes]}


def test_spans_of_an_answer_are_versions_with_their_counts():
    found = generation(answer())
    assert found.versions == [(3, 1), (4, 2)]
    assert (found.token_ids.tolist(), found.finish_reason) == ([5, 6, 7], "length")
    np.testing.assert_array_equal(found.logprobs, np.float32([-0.5, -1.0, -1.5]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"finish_reason": "abort"}, "ended request r by 'abort'"), ({"weight_versions": None}, "versions of 0")],
)
def test_an_answer_that_is_not_whole_or_has_no_versions_is_an_error(changes: dict[str, object], message: str):
    with pytest.raises(RuntimeError, match=message):
        generation(answer(**changes))


def test_a_server_that_is_not_there_is_told_by_its_connection():
    async def run() -> None:
        client = ServerClient("vLLM", "http://127.0.0.1:1", "")
        try:
            await client.get("/version")
        finally:
            await client.close()

    with pytest.raises(ActorDied, match="vLLM at http://127.0.0.1:1 cannot be reached"):
        asyncio.run(run())
