"""A mixture of reasoning-gym families: ``env=streamrl.envs.adapters.families:Families``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamrl.envs.adapters.mixture import Mixture

_FAMILY = "streamrl.envs.reasoning_gym:ReasoningGym"


class Families(Mixture):
    """``families``: weights by family, or what ``ReasoningGym`` takes and a ``weight`` by family.

    ``{chain_sum: 2, leg_counting: {weight: 1, max_animals: 3}}``; ``common`` are options of all of them.
    """

    name = "families"

    def __init__(
        self, families: Mapping[str, Any], common: Mapping[str, Any] | None = None, curriculum: str | None = None
    ) -> None:
        parts = []
        for family, given in families.items():
            options = dict(given) if isinstance(given, Mapping) else {"weight": given}
            weight = options.pop("weight", 1.0)
            args = {**(common or {}), **options, "family": family}
            parts.append({"name": _FAMILY, "args": args, "weight": weight, "label": family})
        super().__init__(parts, curriculum)
