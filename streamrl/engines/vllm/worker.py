"""What runs in vLLM's worker processes: weights from the actor's shared memory, scores at any temperature, and what
the model really computes in. vLLM mixes ``WorkerExtension`` into its worker by ``worker_extension_cls``.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, initialize_layerwise_reload

from streamrl.engines.blueprint import Blueprint
from streamrl.engines.shelf import ShelfReader
from streamrl.engines.vllm.adapters import HeldAdapter
from streamrl.engines.vllm.experts import pack_with_every_load
from streamrl.engines.vllm.heads import repack_tied_heads, tied_heads
from streamrl.engines.vllm.settings import WEIGHTS
from streamrl.engines.vllm.staged import SecondSet, Stager

# Each reload would warn of layers that got no weights of their own: a missing parameter is an error of ours below.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing has to be set up: the place of the weights comes with each update."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """What ``Shelf.put`` says."""

    path: str
    size: int
    places: list[tuple[str, list[int], str, int]]


class SharedMemoryTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Checkpoint-format weights out of a ``Shelf``, through vLLM's layer-by-layer reload.

    The reload writes into the tensors that the kernels know: also where a backend had packed the weights and dropped
    the originals, as on a CPU. A tensor that did not arrive is an error, after which the model must not serve.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._reader = ShelfReader()
        self._loaded: set[str] = set()

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        self._wanted = {name for name, _ in self.model.named_parameters()}
        self._loaded = set()
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        tensors = self._reader.views(update_info.path, update_info.size, update_info.places)
        self._loaded |= set(self.model.load_weights(iter(tensors.items())) or ())

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        repack_tied_heads(self.model)
        if missing := self._wanted - self._loaded:
            raise RuntimeError(f"vLLM loaded no weights into {sorted(missing)[:3]} ({len(missing)} parameters)")

    def abandon(self, config: VllmConfig) -> None:
        """End an update that will not be finished; the model can be loaded anew after it."""
        with set_current_vllm_config(config):
            finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        self._reader = ShelfReader()


WeightTransferEngineFactory.register_engine(WEIGHTS, SharedMemoryTransfer)
pack_with_every_load()


class WorkerExtension:
    """Methods of vLLM's worker that the actor calls by ``collective_rpc``."""

    model_runner: Any
    model_config: Any
    vllm_config: Any
    weight_transfer_engine: Any
    _weight_update_active: bool
    _streamrl_logits_dtype: str | None = None
    """None until ``streamrl_prepare``; empty until a forward pass."""
    _streamrl_adapter: HeldAdapter | None = None
    """With LoRA, from ``streamrl_hold_adapter`` on."""
    _streamrl_stager: Stager | None = None
    """With ``sync.stage=device``, from ``streamrl_keep_second_set`` on."""

    def streamrl_live_with(self, actor: int) -> None:
        """``actor`` is the process that this one must not outlive."""
        _die_with(actor)
        _unlink_shared_memory()

    def streamrl_prepare(self) -> None:
        """Before the first request; where a server outlives its actors, by each of them."""
        if self._streamrl_logits_dtype is not None:
            return
        self._streamrl_logits_dtype = ""
        for module in self.model_runner.get_model().modules():
            if isinstance(module, LogitsProcessor):
                module.register_forward_hook(self._streamrl_see)
        _score_at_temperature(self.model_runner)

    def streamrl_facts(self) -> dict[str, Any]:
        """Dtype of the weights, that of the logits of the last forward pass (empty on ranks without a head), tied."""
        model = self.model_runner.get_model()
        return {
            "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
            "head_dtype": self._streamrl_logits_dtype,
            "tied": bool(tied_heads(model)) or not any(isinstance(each, ParallelLMHead) for each in model.modules()),
        }

    def streamrl_hold_adapter(self, shapes: Mapping[str, Sequence[int]], rank: int, alpha: float) -> list[str]:
        """As in ``HeldAdapter.begin``."""
        if self._streamrl_adapter is None:
            self._streamrl_adapter = HeldAdapter(self.model_runner)
        return self._streamrl_adapter.begin(shapes, rank, alpha)

    def streamrl_replace_adapter(self, placed: dict[str, Any]) -> None:
        """By what the shelf of ``placed`` holds, while no step runs."""
        assert self._streamrl_adapter is not None, "streamrl_hold_adapter comes first"
        self._streamrl_adapter.replace(ShelfReader().views(**placed))

    def streamrl_keep_second_set(self) -> str:
        """Of the weights, for ``streamrl_stage``; why that cannot be, or nothing."""
        try:
            self._streamrl_stager = Stager(SecondSet(self.model_runner.get_model(), self.model_config))
        except ValueError as error:
            return f"no second set of this model's weights can be kept: {error}"
        except torch.OutOfMemoryError:
            return "no room for a second set of weights, which a lower engine.args.gpu_memory_utilization leaves"
        return ""

    def streamrl_stage(self, placed: dict[str, Any], report: str) -> None:
        """Fill the second set with what the shelf of ``placed`` holds, beside the steps; ``report`` is told the end."""
        assert self._streamrl_stager is not None, "streamrl_keep_second_set comes first"
        self._streamrl_stager.begin(placed, report)

    def streamrl_exchange(self) -> None:
        """The sets, while no step runs."""
        assert self._streamrl_stager is not None, "streamrl_keep_second_set comes first"
        self._streamrl_stager.second.exchange()

    def streamrl_shapes(self) -> dict[str, list[int]]:
        """Of the parameters of the transformers model in the server's folder, by name."""
        blueprint = Blueprint.of(self.model_config.model, "float32")
        return {name: list(shape) for name, shape in blueprint.shapes.items()}

    def streamrl_sees(self, placed: dict[str, Any], values: dict[str, list[float]]) -> dict[str, bool]:
        """Whether the shelf of ``placed`` holds ``values`` for this process."""
        found = ShelfReader().views(**placed)
        return {"sees": {name: tensor.tolist() for name, tensor in found.items()} == values}

    def streamrl_end_update(self) -> None:
        """Of an actor that died in the middle of one: the weights are of no version until the next update."""
        if self._weight_update_active:
            self.weight_transfer_engine.abandon(self.vllm_config)
            self._weight_update_active = False

    def streamrl_forget(self) -> None:
        """Let go of the memory of an actor that ends."""
        self.weight_transfer_engine.shutdown()

    def _streamrl_see(self, module: torch.nn.Module, args: object, logits: torch.Tensor | None) -> None:
        if logits is not None:
            self._streamrl_logits_dtype = str(logits.dtype).removeprefix("torch.")


def _score_at_temperature(runner: Any) -> None:
    """Let prompt log-probs be those of the request's temperature; vLLM 0.32 gives those of temperature 1.

    It computes them request by request, so ours calls it once per temperature with the requests of that temperature.
    """
    original: Callable[..., dict[str, Any]] = runner._get_prompt_logprobs_dict

    def by_temperature(hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]) -> dict[str, Any]:
        asked, sampler = runner.num_prompt_logprobs, runner.sampler
        groups: dict[float, dict[str, int]] = {}
        for request, count in asked.items():
            groups.setdefault(runner.requests[request].sampling_params.temperature, {})[request] = count
        found: dict[str, Any] = {}
        try:
            for temperature, some in groups.items():
                runner.num_prompt_logprobs = some  # vLLM takes those out that are done
                sampler.compute_logprobs = partial(_logprobs_at, temperature)
                found |= original(hidden_states, num_scheduled_tokens)
                del sampler.compute_logprobs
        finally:
            runner.num_prompt_logprobs = asked
        left = set[str]().union(*groups.values())
        for request in asked.keys() - left:
            del asked[request]
        return found

    runner._get_prompt_logprobs_dict = by_temperature


def _logprobs_at(temperature: float, logits: torch.Tensor) -> torch.Tensor:
    return (logits.to(torch.float32) / temperature).log_softmax(dim=-1)


def _unlink_shared_memory() -> None:
    """Take the names off vLLM's own segments, which several workers share: all have mapped them by now, and the kernel
    frees what has no name with its last process, however that ends."""
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/" in line}
    for path in mapped:
        if path.startswith(("/dev/shm/psm_", "/dev/shm/vllm_dist_")):
            Path(path).unlink(missing_ok=True)  # another worker was first


def _die_with(actor: int) -> None:
    """End this process, and vLLM's process above it, as soon as ``actor`` is gone, however it went."""
    parent = os.getppid()
    ended = select.poll()  # and not select.select, which takes no descriptor over 1023
    ended.register(os.pidfd_open(actor), select.POLLIN)

    def watch() -> None:
        ended.poll()
        if parent != actor and os.getppid() == parent:
            os.kill(parent, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="streamrl-die-with-actor", daemon=True).start()
