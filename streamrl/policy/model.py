"""Find or build the initial checkpoint, and load it: a folder with a transformers model and its tokenizer.

A built model is a small Qwen3, drawn by the run's seed, warmed up on the tasks' own answers (``warmup.py``) and kept in
the user's cache folder under a hash of everything that determines it.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from streamrl.errors import ConfigError
from streamrl.policy.tokenizer import character_tokenizer
from streamrl.policy.warmup import FIRST_TASK, Lessons, Progress, warm_up
from streamrl.schema import Config

BUILT_IN = "tiny-qwen3"
RECIPE = 3
"""Version of what this module and the warm-up do; a change that alters the built model raises it."""

TINY: Mapping[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 32,
    "initializer_range": 0.01,
    "tie_word_embeddings": False,
}
"""About 1.4 million parameters. Two wide layers learn sums in fewer answers than four narrow ones of the same cost."""

_FINGERPRINTED_TASKS = 64
_FROM_TOKENIZER = ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")
CHECKPOINT_FILES = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja")
"""What is fetched of a model on the hub, and kept of a run's first checkpoint; no pickled weights."""


def prepare_model(config: Config, lessons: Lessons | None, progress: Progress) -> Path:
    """The folder of the checkpoint that version 0 of the policy is loaded from.

    ``model.name`` is a folder, ``tiny-qwen3`` (built here, and warmed up on ``lessons``), or the name of a model on the
    hub, which is the only one that touches the network. ``lessons`` maps any index to a demonstration;
    ``progress`` is told steps done, steps in all and a line of text. Raises ``ConfigError`` of one line.

    A built model is written aside and renamed, so two launches at once both get a whole one. With ``model.cache`` off
    it goes to a new temporary folder, which the caller owns.
    """
    name = config.model.name
    if name == BUILT_IN:
        return _built(config, lessons, progress)
    if Path(name).is_dir():
        return checked_folder(Path(name), "model.name")
    return _from_hub(name)


def load_model(folder: Path | str, dtype: str, device: torch.device | str = "cpu") -> PreTrainedModel:
    """The causal language model in ``folder`` with its parameters in ``dtype`` (such as ``float32``), in eval mode.

    Raises ``ConfigError`` for a CUDA device that is not there.
    """
    where = torch.device(device)
    if where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"engine.device={device}: found {torch.cuda.device_count()} CUDA devices; set engine.device=cpu"
        )
    transformers.utils.logging.disable_progress_bar()  # a bar per actor would run through the live table
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="sdpa", local_files_only=True, use_safetensors=True
    )
    model.to(where)  # type: ignore[arg-type]
    return model


def load_tokenizer(folder: Path | str) -> PreTrainedTokenizerBase:
    """The tokenizer in ``folder``."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return tokenizer


def checked_folder(folder: Path, key: str) -> Path:
    """``folder``, the value of the setting ``key``; ``ConfigError`` where no transformers checkpoint is in it."""
    where = f"{key}={folder}"
    try:
        described = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        raise ConfigError(f"{where}: no config.json in it, so it is not a transformers checkpoint") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}: config.json cannot be read: {error}") from error
    if not isinstance(described, dict) or "model_type" not in described:
        raise ConfigError(f"{where}: config.json has no model_type, so it is not that of a transformers checkpoint")
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(
            f"{where}: no *.safetensors in it; save the model with save_pretrained (pickles are not read)"
        )
    if not any((folder / file).exists() for file in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        raise ConfigError(f"{where}: no tokenizer in it; save one beside the model with tokenizer.save_pretrained")
    return folder


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(name, allow_patterns=list(CHECKPOINT_FILES))
    except Exception as error:  # the hub client raises a dozen unrelated types; each means: no model
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"model.name={name}: no such folder, not the built-in {BUILT_IN!r}, and the hub did not give it: "
            f"{type(error).__name__}: {reason:.160}"
        ) from error
    return checked_folder(Path(folder), "model.name")


def _built(config: Config, lessons: Lessons | None, progress: Progress) -> Path:
    warmup = config.model.warmup
    if warmup.steps and lessons is None:
        raise ConfigError(f"model.warmup.steps={warmup.steps}: the environment has no tasks to warm up on; set it to 0")
    tokenizer = character_tokenizer()
    architecture = _architecture(config, tokenizer)
    if not config.model.cache:
        folder = Path(tempfile.mkdtemp(prefix="streamrl-model-"))
        _build(config, architecture, tokenizer, lessons, progress, folder)
        return folder
    models = _cache_folder()
    target = models / _key(config, architecture, tokenizer, lessons)
    if target.is_dir():
        progress(1, 1, f"warmed-up model found in {target}")
        return target
    aside = Path(tempfile.mkdtemp(prefix=".building-", dir=models))
    try:
        _build(config, architecture, tokenizer, lessons, progress, aside)
        _rename(aside, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)  # gone already unless building failed or another launch was first
    return target


def _architecture(config: Config, tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    known = {field.name for field in dataclasses.fields(Qwen3Config)} - set(_FROM_TOKENIZER)
    for name in config.model.args:
        if name in _FROM_TOKENIZER:
            raise ConfigError(f"model.args.{name}: the built tokenizer determines it; leave it out")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"model.args.{name}: Qwen3's config has no such field{hint}")
    fields = {**TINY, "max_position_embeddings": config.model.max_length, **config.model.args}
    try:
        return Qwen3Config(
            **fields,
            vocab_size=len(tokenizer),
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
        )
    except Exception as error:  # transformers validates with types of its own; all mean: a bad value
        raise ConfigError(f"model.args: {' '.join(str(error).split())}") from error


def _build(
    config: Config,
    architecture: Qwen3Config,
    tokenizer: PreTrainedTokenizerFast,
    lessons: Lessons | None,
    progress: Progress,
    folder: Path,
) -> None:
    model = _initial(architecture, config.seed)
    if config.model.warmup.steps and lessons is not None:
        warm_up(model, tokenizer, lessons, config.model.warmup, config.model.max_length, progress)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _initial(architecture: Qwen3Config, seed: int) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            return Qwen3ForCausalLM(architecture)
        except (ValueError, RuntimeError, ZeroDivisionError) as error:
            raise ConfigError(f"model.args: no Qwen3 can be built from them: {error}") from error


def _cache_folder() -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    models = root / "streamrl" / "models"
    try:
        models.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{models}: cannot keep built models there ({error.strerror}); set XDG_CACHE_HOME or model.cache=false"
        ) from error
    return models


def _key(config: Config, architecture: Qwen3Config, tokenizer: PreTrainedTokenizerFast, lessons: Lessons | None) -> str:
    """Hash of all that determines the built model; the first tasks stand for the code that makes them."""
    warmup = config.model.warmup
    determined: dict[str, Any] = {
        "recipe": RECIPE,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "architecture": architecture.to_dict(),
        "tokenizer": [tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template],
        "seed": config.seed,
        "warmup": dataclasses.asdict(warmup) if warmup.steps else None,
    }
    if warmup.steps and lessons is not None:
        determined["env"] = [config.env.name, config.env.args]
        determined["tasks"] = [lessons(FIRST_TASK + index) for index in range(_FINGERPRINTED_TASKS)]
    text = json.dumps(determined, sort_keys=True, default=str)
    return f"{BUILT_IN}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _rename(aside: Path, target: Path) -> None:
    try:
        aside.rename(target)
    except OSError:
        if not target.is_dir():  # otherwise another launch was first with the same model
            raise
