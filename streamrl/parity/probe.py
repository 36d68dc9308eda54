"""The probe: token ids that every process of a run makes alike, from the seed and the size of the vocabulary."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from streamrl.errors import ConfigError
from streamrl.schema import Config

LONGEST = 256
"""Tokens of the longest row; ``model.max_length`` may allow fewer."""
SAMPLED = 24
"""Tokens that are sampled after each prompt."""
SHARED = 272
"""Tokens that prompts share, where ``model.max_length`` allows: more than two blocks of 128 of a prefix cache."""
IN_FLIGHT = 96
"""Tokens of a request that is in flight across the first update."""


@dataclass(frozen=True)
class ProbeSet:
    """What engines and trainer are held against each other on."""

    scored: tuple[tuple[int, ...], ...]
    """Whole rows, to score: short, long, repeated, and of the rarest tokens."""
    prompts: tuple[tuple[int, ...], ...]
    """To sample from, each unlike the others from its first token on."""
    sharing: tuple[tuple[int, ...], ...]
    """Prompts with one long prefix in common: where a prefix cache or cascade attention comes in."""
    overtaken: tuple[tuple[int, ...], ...]
    """Prompts of the requests that the first update overtakes."""
    sampled: int
    """Tokens sampled after each prompt."""
    in_flight: int
    """Tokens of a request that an update overtakes."""


def probe_set(vocabulary: int, config: Config) -> ProbeSet:
    """The probe of ``config.seed`` for a model with ``vocabulary`` token ids."""
    generator = np.random.default_rng(config.seed)
    most = config.model.max_length
    longest = min(most, LONGEST)
    sampled = max(1, min(SAMPLED, most // 4))
    longest_prompt = max(1, most - sampled)

    def draw(length: int) -> tuple[int, ...]:
        return tuple(generator.integers(0, vocabulary, size=length).tolist())

    mixed = draw(longest)
    rarest = tuple(range(max(0, vocabulary - 16), vocabulary))
    rows = [mixed[: max(2, longest // 16)], mixed, (mixed[0],) * max(2, longest // 4), rarest[:longest]]
    shared = draw(min(SHARED, max(0, longest_prompt - 2)))
    prompts = [draw(min(length, longest_prompt)) for length in (1, 2, 5, 9, 14, 20, 31, 40)]
    sharing = [shared + draw(min(2, longest_prompt - len(shared))) for _ in range(3)]
    overtaken = [draw(min(length, longest_prompt)) for length in (3, 8, 17, 33)]
    return ProbeSet(
        scored=tuple(rows),
        prompts=tuple(prompts),
        sharing=(*sharing, sharing[0]),  # the last: a prompt that is in the cache as a whole
        overtaken=tuple(overtaken),
        sampled=sampled,
        in_flight=max(1, min(IN_FLIGHT, most - max(map(len, overtaken)))),
    )


def probe_of(model_folder: str, config: Config) -> ProbeSet:
    """The probe for the checkpoint in ``model_folder``; ``ConfigError`` where that does not say its vocabulary."""
    path = Path(model_folder, "config.json")
    settings = json.loads(path.read_text())
    vocabulary = settings.get("vocab_size") or settings.get("text_config", {}).get("vocab_size")
    if not vocabulary:
        raise ConfigError(f"{path}: expected vocab_size, which the parity probe draws its tokens from; got none")
    return probe_set(int(vocabulary), config)
