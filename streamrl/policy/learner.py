"""One trainer rank's share of an optimizer step: forward, loss, backward, clip, update (C1, C8, C9).

Knows nothing of actors or the event loop: ``step`` blocks and is called on a worker thread. Where the ranks act as one,
every method marked *collective* must be called by all of them in the same order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from streamrl.errors import ConfigError, DivergedError, StalenessError
from streamrl.loss.diagnostics import Diagnostics
from streamrl.loss.logprobs import token_logprobs
from streamrl.loss.policy import policy_loss
from streamrl.policy.optimizer import clip_gradients, gradient_norm, learning_rate, make_optimizer
from streamrl.policy.packing import Packed, pack
from streamrl.policy.parallel import accumulate_only, full_parameters, reshard, shard
from streamrl.schema import Config
from streamrl.types import RankBatch, TrainGroup, Trajectory

ROW_PER_HIDDEN = 6
"""In a layer of width H a row of L tokens costs about 4·L²·H in attention and 24·L·H² elsewhere: equal at L = 6·H."""


class PackedPolicy(nn.Module):
    """A transformers causal LM as a function from packed rows to the log-probs of their targets."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, packed: Packed, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-prob and entropy float32 ``[N]`` of ``packed.target``; the head runs on the N source tokens only."""
        body = self.model.get_decoder()(
            input_ids=packed.tokens,
            attention_mask=packed.attention_mask(),
            position_ids=packed.positions,
            use_cache=False,
        )
        head = self.model.get_output_embeddings()
        hidden = body.last_hidden_state.flatten(0, 1).index_select(0, packed.source)
        return token_logprobs(hidden, head.weight, packed.target, temperature, bias=getattr(head, "bias", None))


class Learner:
    """Owns the policy's parameters on this rank, their gradients and the optimizer.

    ``model`` is a transformers causal LM with sdpa attention, equal on all ranks; with a ``mesh`` of more than one rank
    it is sharded in place. ``updates`` counts steps and drives the schedule; a restart sets it and the optimizer state.
    """

    def __init__(self, config: Config, model: Any, mesh: DeviceMesh | None = None) -> None:
        if model.config._attn_implementation != "sdpa":
            raise ConfigError(
                f"packed rows need a boolean 4-D attention mask: load the model with attn_implementation='sdpa', "
                f"got {model.config._attn_implementation!r}"
            )
        self.config = config
        self.model = model.eval()
        self.updates = 0
        self._policy = PackedPolicy(model)
        self._rank, self._ranks, self._group = 0, 1, None
        if mesh is not None and mesh.size() > 1:
            self._rank, self._ranks, self._group = mesh.get_local_rank(), mesh.size(), mesh.get_group()
            shard(self._policy, model.get_decoder().layers, mesh)
        self.optimizer = make_optimizer(model, config.trainer)
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._device = self._parameters[0].device
        self._row_tokens = ROW_PER_HIDDEN * model.config.hidden_size

    def step(self, batch: RankBatch) -> dict[str, float]:
        """Train on ``batch`` and return the step's metrics, equal on all ranks but for ``time/``. Collective.

        Without a single trainable token on any rank the parameters stay as they are, the step still counts.
        Raises ``StalenessError`` for a token from the future, and ``DivergedError``, on all ranks alike and before
        the parameters change, where the loss or the gradient is not finite.
        """
        started = time.perf_counter()
        packs = [pack(micro, batch.version, batch.oldest_allowed, self._row_tokens) for micro in batch.micro_batches]
        try:
            diagnostics = self._forward_backward(batch, packs)
            metrics, broken = diagnostics.reduce(self._group)
            norm = gradient_norm(self._parameters, self._group)
            self._check_finite(batch.step, metrics["policy/loss"], norm, broken)
            halfway = time.perf_counter()
            rate = self._update(norm, trained=metrics["trained_tokens"] > 0)
        finally:
            self.optimizer.zero_grad(set_to_none=True)
        metrics["policy/grad_norm"], metrics["policy/lr"] = norm, rate
        metrics["time/forward_backward"] = halfway - started
        metrics["time/optimizer"] = time.perf_counter() - halfway
        return metrics

    def score(self, token_ids: Sequence[int] | np.ndarray, temperature: float = 1.0) -> np.ndarray:
        """Log-probs float32 ``[T]`` of each token given those before it (first: 0), as ``Engine.score``. Collective."""
        tokens = np.asarray(token_ids, dtype=np.int32)
        scores = np.zeros(len(tokens), dtype=np.float32)
        if len(tokens) > 1:
            with torch.no_grad():
                logprobs, _ = self._policy(_scoring_row(tokens).to(self._device), temperature)
            reshard(self._policy)
            scores[1:] = logprobs.cpu().numpy()
        return scores

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """``(name, full tensor)`` of every parameter, gathered one at a time. Collective."""
        return full_parameters(self.model)

    def _forward_backward(self, batch: RankBatch, packs: list[Packed]) -> Diagnostics:
        bound = batch.version - batch.oldest_allowed
        if bound < 0:
            raise StalenessError(f"oldest_allowed {batch.oldest_allowed} is newer than the trainer at {batch.version}")
        diagnostics = Diagnostics(bound, self._device, self._rank, self._ranks)
        for index, packed in enumerate(packs, start=1):
            accumulate_only(self._policy, on=index < len(packs))
            on_device = packed.to(self._device)
            logprobs, entropy = self._policy(on_device, self.config.sampling.temperature)
            result = policy_loss(
                self.config.loss, logprobs, on_device.behaviour, on_device.advantages, on_device.token_weights
            )
            # An empty micro-batch goes all the way too: the other ranks wait for this one in the collectives.
            result.loss.backward()
            diagnostics.add(
                result, entropy, on_device.lag, on_device.trajectory, packed.trajectories, packed.masked_tokens
            )
        return diagnostics

    def _check_finite(self, step: int, loss: float, norm: float, broken: list[int]) -> None:
        if broken:
            ranks = ", ".join(map(str, broken))
            raise DivergedError(f"step {step}: the loss on rank {ranks} is not finite; the weights are unchanged")
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise DivergedError(
                f"step {step}: the gradient norm over all ranks is {norm} (loss {loss:.3g}, finite on every rank); "
                "the weights are unchanged"
            )

    def _update(self, norm: float, trained: bool) -> float:
        config = self.config.trainer
        rate = learning_rate(config, self.updates, self.config.steps)
        self.updates += 1
        if trained:
            clip_gradients(self._parameters, norm, config.max_grad_norm)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
        return rate


def _scoring_row(tokens: np.ndarray) -> Packed:
    """Every token but the first as a target."""
    sampled = np.arange(len(tokens)) > 0
    trajectory = Trajectory(tokens, sampled, np.zeros(len(tokens), np.float32), [(0, len(tokens) - 1)])
    group = TrainGroup(0, "", [trajectory], np.zeros(1), np.zeros(1))
    return pack([group], version=0, oldest_allowed=0, row_tokens=len(tokens))
