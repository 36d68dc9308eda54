"""Log-probs of the reference policy of a KL term: by a frozen copy here, or as they came with the data.

With ``loss.kl.serve=engine`` the process of ``actors/reference.py`` scored each group before it was put, and its
log-probs travel as the column ``reference``; with ``trainer`` every rank holds (its shard of) a frozen copy. Where
adapters are trained, the policy at the start is the model without them, and needs no copy.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor, from_numpy

from streamrl.errors import ConfigError
from streamrl.objective_checks import serves_reference
from streamrl.policy.model import load_model
from streamrl.policy.precision import compute_dtype, freeze
from streamrl.schema import Config
from streamrl.types import TrainGroup, Trajectory, expand_versions

REFERENCE = "reference"
"""Column: float32 ``[T]``, log π_ref of each token given those before it, the first 0."""


def columns_of(config: Config) -> tuple[str, ...]:
    """Columns beside the standard ones that training reads."""
    return (REFERENCE,) if serves_reference(config) else ()


def is_base(config: Config) -> bool:
    """Whether the reference is the trained model itself, without its adapters."""
    return config.model.lora.rank > 0 and config.loss.kl.reference == "initial" and not serves_reference(config)


def frozen_copy(config: Config, model: Any) -> Any | None:
    """The reference as a model of its own, where the trainer holds one: a copy of ``model`` now, or a checkpoint."""
    kl = config.loss.kl
    if not kl.reference or serves_reference(config) or is_base(config):
        return None
    if kl.reference == "initial":
        found = copy.deepcopy(model)
    else:
        found = load_model(kl.reference, config.model.dtype, model.device).eval()
    return freeze(found, compute_dtype(config.model.dtype))


def delivered(groups: Sequence[TrainGroup], oldest_allowed: int) -> Tensor:
    """float32 ``[N]``, the column at the trainable tokens of a micro-batch, in the order of ``packing.pack``.

    Raises ``ConfigError`` for a trajectory that came without it.
    """
    parts = [np.zeros(0, dtype=np.float32)]
    parts += [_trained(group, one, oldest_allowed) for group in groups for one in group.trajectories]
    return from_numpy(np.concatenate(parts))


def _trained(group: TrainGroup, one: Trajectory, oldest_allowed: int) -> np.ndarray:
    column = one.columns.get(REFERENCE)
    if column is None or column.shape != one.tokens.shape:
        found = "none" if column is None else f"shape {list(column.shape)}"
        raise ConfigError(
            f"loss.kl.serve=engine: expected a column {REFERENCE!r} {list(one.tokens.shape)} with each trajectory of "
            f"lease {group.lease}, got {found}; data of a run without it train with loss.kl.serve=trainer"
        )
    return column[one.sampled][expand_versions(one.versions) >= oldest_allowed].astype(np.float32)
