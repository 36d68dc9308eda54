"""What SGLang lacks to run on a CPU without its CUDA kernels: a platform that computes everything in plain torch.

SGLang finds ``activate`` by the entry point ``sglang.srt.platforms`` and calls it inside its own processes. Nothing of
streamrl's dependencies is needed there. On a machine with a GPU it stands back, and SGLang chooses its own platform.
"""

from __future__ import annotations

from functools import cache


def activate() -> str | None:
    """Name of the platform class; None where torch sees an accelerator."""
    import torch

    return None if torch.cuda.is_available() else f"{__name__}:TorchCpuPlatform"


@cache
def _platform() -> type:
    from sglang.srt.platforms.cpu import CpuDeviceMixin
    from sglang.srt.platforms.device_mixin import PlatformEnum
    from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

    class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):
        """Every fused operation by its ``forward_native``, attention by torch, no pinned memory."""

        _enum = PlatformEnum.OOT
        device_name = device_type = "cpu"
        capabilities = PlatformCapabilities()

        def get_default_attention_backend(self) -> str:
            return "torch_native"

        def get_dispatch_key_name(self) -> str:
            return "native"

        def is_pin_memory_available(self, device: object = None) -> bool:
            return False

    return TorchCpuPlatform


def __getattr__(name: str) -> type:
    """``TorchCpuPlatform`` is made when SGLang asks for it: this module is imported where SGLang is not, too."""
    if name == "TorchCpuPlatform":
        return _platform()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
