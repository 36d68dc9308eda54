"""Which models an engine loads and scores right: ``python tests/real/try_models.py ENGINE [MODEL …]``, from the root.

Each model is a tiny one of random weights, made on the spot, in float32 on a CPU. The engine starts with other weights,
then loads A, B and A again, and scores rows under each; printed is the largest difference of a log-prob from that of
transformers. With ENGINE vllm this is run by the interpreter that has vLLM; for sglang, ``STREAMRL_SGLANG_PYTHON``
names the one that has SGLang. Without MODEL all are tried, each in a process of its own.
"""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np
import torch
import transformers

from streamrl.config import load_config
from streamrl.policy.model import load_model
from streamrl.policy.tokenizer import character_tokenizer
from streamrl.ports import Engine

VOCABULARY = len(character_tokenizer())
MAX_LENGTH = 128
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
GROUPS: dict[str, Any] = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"tie_word_embeddings": True},
    "qwen2": {},
    "llama": {},
    "glm4": {},
    "phi3": {},
    "gpt_neox": {},
    "gpt2": {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "gemma2": {"tie_word_embeddings": True, "query_pre_attn_scalar": 32, "sliding_window": 64},
    "gemma3_text": {"tie_word_embeddings": True, "query_pre_attn_scalar": 32, "sliding_window": 64},
    "hrm_text": {"num_key_value_heads": 4},
    "qwen3_moe": {"num_experts": 4, "norm_topk_prob": True, **EXPERTS},
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 32, **EXPERTS},
    "mixtral": {"num_local_experts": 4, **EXPERTS},
    "olmoe": {"num_experts": 4, **EXPERTS},
    "granitemoe": {"num_local_experts": 4, **EXPERTS},
    "glm4_moe": {"n_routed_experts": 4, **GROUPS, **EXPERTS},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "head_dim": 64,
        "topk_method": "noaux_tc",
        "kv_lora_rank": 512,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        **GROUPS,
        **EXPERTS,
    },
    "gpt_oss": {"num_local_experts": 4, "sliding_window": 64, **EXPERTS},
}


def drawn(model: Any, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.rand(each.shape, generator=generator) / 2 + 0.75
        if each.ndim == 1
        else torch.randn(each.shape, generator=generator) * 1.2 / math.sqrt(each.shape[-1])
        for name, each in model.named_parameters()
    }


@torch.no_grad()
def expected(model: Any, weights: dict[str, torch.Tensor], row: list[int]) -> np.ndarray:
    """float64 ``[T]``: log-prob of each token after those before it; the first is 0."""
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    logprobs = model(input_ids=torch.tensor([row]), use_cache=False).logits[0].double().log_softmax(-1)
    return np.concatenate([[0.0], logprobs[:-1].gather(1, torch.tensor(row[1:])[:, None])[:, 0].numpy()])


async def started(engine: str, folder: str) -> Engine:
    overrides = ["engine.slots=4", f"model.max_length={MAX_LENGTH}", "model.dtype=float32"]
    if engine == "vllm":
        from streamrl.engines.vllm.engine import VllmEngine

        return await VllmEngine.start(load_config(overrides=[*overrides, "engine=vllm"]), folder)
    if engine == "sglang":
        from streamrl.engines.sglang.engine import SglangEngine

        python = f"engine.python={os.environ['STREAMRL_SGLANG_PYTHON']}"
        return await SglangEngine.start(load_config(overrides=[*overrides, "engine=sglang", python]), folder)
    from streamrl.engines.embedded import EmbeddedEngine

    embedded = EmbeddedEngine(load_model(folder, "float32"), slots=4, max_length=MAX_LENGTH)
    await embedded.start()
    return embedded


async def differences(engine_name: str, model_type: str, folder: str) -> list[float]:
    """Largest of each load, in nats."""
    config = transformers.AutoConfig.for_model(model_type, **SIZES | MODELS[model_type])
    config.dtype = "float32"
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    model.load_state_dict(drawn(model, seed=0), strict=False)
    model.save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    rows = [np.random.default_rng(size).integers(5, VOCABULARY, size).tolist() for size in (5, 40, 90)]
    found = []
    engine = await started(engine_name, folder)
    try:
        for version, seed in enumerate((1, 2, 1)):
            weights = drawn(model, seed)
            await engine.pause()
            await engine.load(version, weights)
            await engine.resume()
            gaps = [np.abs(await engine.score(row) - expected(model, weights, row)).max() for row in rows]
            found.append(float(max(gaps)))
    finally:
        await engine.close()
    return found


def main(engine: str, models: list[str]) -> None:
    if len(models) != 1:
        for model in models or MODELS:
            subprocess.run([sys.executable, __file__, engine, model], check=False)
        return
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = asyncio.run(asyncio.wait_for(differences(engine, models[0], folder), 300))
        except Exception as error:  # noqa: BLE001 whatever it is, it is the result
            print(f"{engine} {models[0]}: {type(error).__name__}: {' '.join(str(error).split()):.300}")
        else:
            print(f"{engine} {models[0]}: " + ", ".join(f"{each:.0e}" for each in found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
