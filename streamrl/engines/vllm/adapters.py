"""The run's LoRA adapter in vLLM's processes: one, replaced in place between two steps (``docs/lora.md``).

vLLM reads adapters from folders when a request names one that it does not hold. Ours has a name and no folder: whenever
vLLM asks for it, it gets the tensors that the actor sent last. So it is never read from a disk, and vLLM may drop it
from its own caches at any time without a request being computed by the base.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.lora.utils import parse_fine_tuned_lora_name

from streamrl.engines.vllm.adapter_plan import ADAPTER, ADAPTER_PATH


def adapter_request() -> LoRARequest:
    """What each request of the run carries; vLLM must have been told of it by ``add_lora`` once."""
    return LoRARequest(lora_name=ADAPTER, lora_int_id=1, lora_path=ADAPTER_PATH)


class HeldAdapter:
    """Of one worker. On a server it outlives the runs that it serves, one after the other."""

    def __init__(self, runner: Any) -> None:
        self._workers_manager = runner.lora_manager
        self._manager = runner.lora_manager._adapter_manager
        self._helper = PEFTHelper(r=1, lora_alpha=1, target_modules=[])
        self._tensors: dict[str, torch.Tensor] = {}
        self._request: LoRARequest | None = None
        """What vLLM knows the adapter by; a server chooses the number."""
        self._from_folder = self._workers_manager._load_adapter
        self._workers_manager._load_adapter = self._load

    def begin(self, shapes: Mapping[str, Sequence[int]], rank: int, alpha: float) -> list[str]:
        """Hold an adapter that adds nothing, until ``replace``: both factors are 0.

        ``shapes``: of its tensors by PEFT's names; their product is scaled by ``alpha / rank``. Returns the paths of
        adapted layers that this worker has no place for: vLLM would ignore their adapters.
        """
        self._helper = PEFTHelper(r=rank, lora_alpha=alpha, target_modules=[])
        self._tensors = {name: torch.zeros(list(shape)) for name, shape in shapes.items()}
        if self._request is not None:
            self._put_in_place(self._request)
        places = set(self._manager.modules)
        for fused in self._manager.modules:
            places |= set(self._manager.packed_modules.get(fused, ()))
        wanted = {parse_fine_tuned_lora_name(name, self._mapper())[0] for name in self._tensors}
        return sorted(wanted - places)

    def replace(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Serve ``tensors`` from the next step on, also to requests in flight."""
        if self._request is None:
            raise RuntimeError("vLLM was not told of the adapter: add_lora comes before the first update")
        self._tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        self._put_in_place(self._request)

    def _put_in_place(self, request: LoRARequest) -> None:
        self._workers_manager.add_adapter(msgspec.structs.replace(request, load_inplace=True))

    def _load(self, request: LoRARequest) -> LoRAModel:
        """In the place of vLLM's own, for our adapter."""
        if request.lora_path != ADAPTER_PATH:
            return self._from_folder(request)
        self._request = msgspec.structs.replace(request, load_inplace=False)
        # Copies, because vLLM scales B where it lies.
        return LoRAModel.from_lora_tensors(
            request.lora_int_id,
            {name: tensor.clone() for name, tensor in self._tensors.items()},
            self._helper,
            device="cpu",
            dtype=self._workers_manager.lora_config.lora_dtype,
            weights_mapper=self._mapper(),
        )

    def _mapper(self) -> Any:
        """vLLM's renaming of the checkpoint's names, for models that have one."""
        mapper = getattr(self._manager.model, "hf_to_vllm_mapper", None)
        return None if mapper is None else mapper.get_rename_mapper()
