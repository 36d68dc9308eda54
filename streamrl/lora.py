"""LoRA adapters (arXiv 2106.09685): which layers get them, their names on the wire, and their injection by ``peft``.

An adapted layer computes ``W·x + alpha/rank · B·(A·x)``, with ``A`` ``[rank, in]`` and ``B`` ``[out, rank]``. Trainer
and engines must agree on names and shapes; both come from here. Names are those of PEFT's checkpoints, so that what
travels can be saved as it is and read by anything that reads them::

    base_model.model.<path of the layer>.lora_A.weight      base_model.model.<path of the layer>.lora_B.weight

Only ``adapted`` and ``without_adapters`` need the package ``peft``; an engine in an interpreter of its own does
without.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from streamrl.errors import ConfigError
from streamrl.lora_schema import LoraConfig

if TYPE_CHECKING:
    import torch
    from torch import nn

ADAPTER = "default"
"""What PEFT calls the one adapter of a model."""
PREFIX = "base_model.model."
_FACTORS = ("lora_A", "lora_B")
_SHOWN = 12
"""Names that a refusal lists at most."""


def adapted(model: Any, lora: LoraConfig, seed: int, dtype: torch.dtype) -> Any:
    """``model``, a transformers causal LM, with adapters in ``dtype`` injected in place and everything else frozen.

    ``A`` is drawn from ``seed`` (Kaiming, as in the paper's code), ``B`` is 0: the model computes what it did before.
    The values depend on the seed and the shapes alone, so that all ranks and every restart get the same.
    Raises ``ConfigError`` where ``peft`` is missing or a target is not in the model.
    """
    import torch
    from torch import nn

    try:
        from peft import LoraConfig as PeftConfig
        from peft import inject_adapter_in_model
    except ImportError as error:
        raise ConfigError(f"model.lora.rank={lora.rank} needs peft: pip install 'streamrl[lora]' ({error})") from None
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    layers = list(_layers(model, lora))
    alpha: Any = lora.alpha  # PEFT says int, and divides
    settings = PeftConfig(r=lora.rank, lora_alpha=alpha, target_modules=layers, init_lora_weights=False)
    inject_adapter_in_model(settings, model, ADAPTER)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in adapter_parameters(model).items():
        initial = torch.zeros(parameter.shape, dtype=torch.float32)
        if name.endswith("lora_A.weight"):
            nn.init.kaiming_uniform_(initial, a=math.sqrt(5), generator=generator)
        parameter.data = initial.to(parameter.device, dtype)
    return model


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The adapters of an ``adapted`` model by the names under which they travel; empty for any other model."""
    found = {}
    for name, parameter in model.named_parameters():
        path, _, rest = name.rpartition(f".{ADAPTER}.")
        if rest == "weight" and path.endswith(_FACTORS):
            found[f"{PREFIX}{path}.weight"] = parameter
    return found


@contextlib.contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Within this an ``adapted`` model is its base: the product of each adapter is added 0 times."""
    from peft.tuners.lora import LoraLayer

    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    try:
        for layer in layers:
            layer.set_scale(ADAPTER, 0.0)
        yield
    finally:
        for layer in layers:
            layer.set_scale(ADAPTER, 1.0)


def adapter_shapes(folder: str, lora: LoraConfig, dtype: str) -> dict[str, torch.Tensor]:
    """Adapters of the transformers model in ``folder``: name → an empty meta tensor of its shape, in ``dtype``.

    In the order of ``adapter_parameters``; no weight is read. Raises ``ConfigError`` for a target that is not there.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, local_files_only=True))
    found = {}
    for path, layer in _layers(model, lora).items():
        for factor, shape in zip(
            _FACTORS, ((lora.rank, layer.in_features), (layer.out_features, lora.rank)), strict=True
        ):
            name = f"{PREFIX}{path}.{factor}.weight"
            found[name] = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
    return found


def peft_config_json(lora: LoraConfig, base: str) -> dict[str, Any]:
    """What ``adapter_config.json`` beside such adapters of the checkpoint folder ``base`` says."""
    return {
        "base_model_name_or_path": base,
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": list(lora.targets) or "all-linear",
        "bias": "none",
        "lora_dropout": 0.0,
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def _layers(model: Any, lora: LoraConfig) -> dict[str, nn.Linear]:
    """Layers to adapt by path, in the model's order."""
    from torch import nn

    blocks = getattr(model.get_decoder(), "layers", nn.ModuleList())
    prefix = "".join(name for name, module in model.named_modules() if module is blocks)
    linear = {f"{prefix}.{name}": module for name, module in blocks.named_modules() if isinstance(module, nn.Linear)}
    known = list(dict.fromkeys(name.rpartition(".")[2] for name in linear))
    for target in lora.targets:
        if not any(_ends(name, target) for name in linear):
            raise ConfigError(
                f"model.lora.targets: no linear layer in the blocks of {type(model).__name__} ends with {target!r}; "
                f"there are {', '.join(known[:_SHOWN]) or 'none'}"
            )
    if not linear:
        raise ConfigError(
            f"model.lora.rank={lora.rank}: the blocks of {type(model).__name__} have no nn.Linear to adapt; "
            "set model.lora.rank=0"
        )
    chosen = lora.targets or known
    return {name: module for name, module in linear.items() if any(_ends(name, target) for target in chosen)}


def _ends(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")
