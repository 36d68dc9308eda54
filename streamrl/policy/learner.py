"""One trainer rank's share of an optimizer step: forward, loss, backward, clip, update (C1, C8, C9).

Knows nothing of actors or the event loop: ``step`` blocks and is called on a worker thread. Where the ranks act as one,
every method marked *collective* must be called by all of them in the same order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from streamrl.errors import ConfigError, DivergedError, StalenessError
from streamrl.loss.diagnostics import Diagnostics
from streamrl.loss.logprobs import token_logprobs
from streamrl.objective_checks import recomputes
from streamrl.policy.optimizer import clip_gradients, gradient_norm, learning_rate, make_optimizer
from streamrl.policy.packing import Packed, pack
from streamrl.policy.parallel import accumulate_only, full_parameters, reshard, shard
from streamrl.policy.reference import columns_of, delivered, frozen_copy
from streamrl.policy.step_loss import MicroBatch, StepLoss, environments, split
from streamrl.schema import Config
from streamrl.types import RankBatch, TrainGroup, Trajectory

ROW_PER_HIDDEN = 6
"""In a layer of width H a row of L tokens costs about 4·L²·H in attention and 24·L·H² elsewhere: equal at L = 6·H."""


class PackedPolicy(nn.Module):
    """A transformers causal LM as a function from packed rows to the log-probs of their targets."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, packed: Packed, temperature: float) -> tuple[Tensor, ...]:
        """Log-prob and entropy float32 ``[N]`` of ``packed.target``; the head runs on the N source tokens only."""
        return self._logprobs(self._hidden(packed), packed, temperature)

    def _hidden(self, packed: Packed) -> Tensor:
        body = self.model.get_decoder()(
            input_ids=packed.tokens,
            attention_mask=packed.attention_mask(),
            position_ids=packed.positions,
            use_cache=False,
        )
        return body.last_hidden_state.flatten(0, 1).index_select(0, packed.source)

    def _logprobs(self, hidden: Tensor, packed: Packed, temperature: float) -> tuple[Tensor, Tensor]:
        head = self.model.get_output_embeddings()
        return token_logprobs(hidden, head.weight, packed.target, temperature, bias=getattr(head, "bias", None))


class ActorCritic(PackedPolicy):
    """The same with a linear head, 0 at the start, that reads the value of the state before each target."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        device = next(model.parameters()).device
        self.value = nn.Linear(model.config.hidden_size, 1, device=device, dtype=torch.float32)
        nn.init.zeros_(self.value.weight)
        nn.init.zeros_(self.value.bias)

    def forward(self, packed: Packed, temperature: float) -> tuple[Tensor, ...]:
        """Log-prob, entropy and value float32 ``[N]``."""
        hidden = self._hidden(packed)
        return *self._logprobs(hidden, packed, temperature), self.value(hidden.float()).squeeze(1)


class Learner:
    """Owns the policy's parameters on this rank, their gradients and the optimizer.

    ``model`` is a transformers causal LM with sdpa attention, equal on all ranks; with a ``mesh`` of more than one rank
    it is sharded in place. ``updates`` counts batches and drives the schedule; a restart sets it and the optimizer.
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
        self.columns = columns_of(config)
        """What each trajectory of a batch has to bring beside the standard columns."""
        self._policy = ActorCritic(model) if config.loss.advantage == "gae" else PackedPolicy(model)
        self._loss = StepLoss(config.loss)
        frozen = frozen_copy(config, model)
        self._reference = None if frozen is None else PackedPolicy(frozen)
        self._rank, self._ranks, self._group = 0, 1, None
        if mesh is not None and mesh.size() > 1:
            self._rank, self._ranks, self._group = mesh.get_local_rank(), mesh.size(), mesh.get_group()
            shard(self._policy, model.get_decoder().layers, mesh)
            if self._reference is not None:
                shard(self._reference, self._reference.model.get_decoder().layers, mesh)
        self.optimizer = make_optimizer(self._policy, config.trainer)
        self._parameters = [parameter for parameter in self._policy.parameters() if parameter.requires_grad]
        self._device = self._parameters[0].device
        self._row_tokens = ROW_PER_HIDDEN * model.config.hidden_size

    def step(self, batch: RankBatch) -> dict[str, float]:
        """Train on ``batch`` and return the step's metrics, equal on all ranks but for ``time/``. Collective.

        Without a single trainable token on any rank the parameters stay as they are, the step still counts.
        Raises ``StalenessError`` for a token from the future, and ``DivergedError``, on all ranks alike and before
        the update changes the parameters, where the loss or the gradient is not finite. Of several updates per batch
        those before it stand.
        """
        bound = batch.version - batch.oldest_allowed
        if bound < 0:
            raise StalenessError(f"oldest_allowed {batch.oldest_allowed} is newer than the trainer at {batch.version}")
        started = time.perf_counter()
        envs = environments(batch.stats)
        parts = [
            [self._laid_out(micro, batch, envs) for micro in part]
            for part in split(batch.micro_batches, self.config.loss.updates_per_batch)
        ]
        diagnostics = Diagnostics(bound, self._device, self._rank, self._ranks, envs)
        largest_norm, optimizer_seconds, trained = 0.0, 0.0, 0.0
        rate = learning_rate(self.config.trainer, self.updates, self.config.steps)
        try:
            statistics = self._before(parts)
            for update, part in enumerate(parts):
                self._forward_backward(part, statistics, diagnostics)
                metrics, broken = diagnostics.reduce(self._group)
                norm = gradient_norm(self._parameters, self._group)
                where = f"step {batch.step}" if update == 0 else f"step {batch.step}, update {update + 1}"
                self._check_finite(where, metrics["policy/loss"], norm, broken, untouched=update == 0)
                updating = time.perf_counter()
                if metrics["trained_tokens"] > trained:
                    self._update(norm, rate)
                self.optimizer.zero_grad(set_to_none=True)
                optimizer_seconds += time.perf_counter() - updating
                largest_norm, trained = max(largest_norm, norm), metrics["trained_tokens"]
        finally:
            self.optimizer.zero_grad(set_to_none=True)
        self.updates += 1
        metrics["policy/grad_norm"], metrics["policy/lr"] = largest_norm, rate
        metrics["time/forward_backward"] = time.perf_counter() - started - optimizer_seconds
        metrics["time/optimizer"] = optimizer_seconds
        return metrics

    def score(self, token_ids: Sequence[int] | np.ndarray, temperature: float = 1.0) -> np.ndarray:
        """Log-probs float32 ``[T]`` of each token given those before it (first: 0), as ``Engine.score``. Collective."""
        tokens = np.asarray(token_ids, dtype=np.int32)
        scores = np.zeros(len(tokens), dtype=np.float32)
        if len(tokens) > 1:
            with torch.no_grad():
                logprobs, *_ = self._policy(_scoring_row(tokens).to(self._device), temperature)
            reshard(self._policy)
            scores[1:] = logprobs.cpu().numpy()
        return scores

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """``(name, full tensor)`` of every parameter, gathered one at a time. Collective."""
        return full_parameters(self.model)

    def _laid_out(self, groups: list[TrainGroup], batch: RankBatch, envs: list[str]) -> MicroBatch:
        packed = pack(groups, batch.version, batch.oldest_allowed, self._row_tokens)
        of_trajectory = [envs.index(g.env) if g.env in envs else -1 for g in groups for _ in g.trajectories]
        truncated = [trajectory.truncated for group in groups for trajectory in group.trajectories]
        reference = delivered(groups, batch.oldest_allowed).to(self._device) if self.columns else None
        assert reference is None or reference.shape == packed.target.shape
        return MicroBatch(
            packed.to(self._device),
            torch.tensor(of_trajectory, dtype=torch.int64, device=self._device),
            torch.tensor(truncated, dtype=torch.bool, device=self._device),
            reference=reference,
        )

    def _before(self, parts: list[list[MicroBatch]]) -> Mapping[str, Tensor] | None:
        """Log-probs of the policy before its first update and of the reference, where they are needed. Collective."""
        every = [micro for part in parts for micro in part]
        for policy, name, needed in (
            (self._policy, "proximal", recomputes(self.config.loss)),
            (self._reference, "reference", self._reference is not None),
        ):
            if not needed:
                continue
            assert policy is not None
            with torch.no_grad():
                for micro in every:
                    logprobs, _, *values = policy(micro.packed, self.config.sampling.temperature)
                    setattr(micro, name, logprobs)
                    if values:
                        (micro.values,) = values
            reshard(policy)
        self._loss.estimate(every, self._group)
        self._loss.renormalise(every, self._group)
        return self._loss.statistics(every, self._group)

    def _forward_backward(
        self, part: list[MicroBatch], statistics: Mapping[str, Tensor] | None, diagnostics: Diagnostics
    ) -> None:
        updates = self.config.loss.updates_per_batch
        for index, micro in enumerate(part, start=1):
            accumulate_only(self._policy, on=index < len(part))
            logprobs, entropy, *values = self._policy(micro.packed, self.config.sampling.temperature)
            result, columns = self._loss(micro, logprobs, statistics, *values)
            # Of several updates each stands for the whole batch. An empty micro-batch goes all the way too: the other
            # ranks wait for this one in the collectives.
            (updates * result.loss).backward()
            packed = micro.packed
            before = logprobs.detach() if micro.proximal is None else micro.proximal
            diagnostics.add(result, entropy, packed.lag, before, packed.masked_tokens, micro.envs, columns)

    def _check_finite(self, where: str, loss: float, norm: float, broken: list[int], untouched: bool) -> None:
        weights = "the weights are unchanged" if untouched else "the weights are those of the update before"
        if broken:
            ranks = ", ".join(map(str, broken))
            raise DivergedError(f"{where}: the loss on rank {ranks} is not finite; {weights}")
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise DivergedError(
                f"{where}: the gradient norm over all ranks is {norm} (loss {loss:.3g}, finite on every rank); "
                f"{weights}"
            )

    def _update(self, norm: float, rate: float) -> None:
        clip_gradients(self._parameters, norm, self.config.trainer.max_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()


def _scoring_row(tokens: np.ndarray) -> Packed:
    """Every token but the first as a target."""
    sampled = np.arange(len(tokens)) > 0
    trajectory = Trajectory(tokens, sampled, np.zeros(len(tokens), np.float32), [(0, len(tokens) - 1)])
    group = TrainGroup(0, "", [trajectory], np.zeros(1), np.zeros(1))
    return pack([group], version=0, oldest_allowed=0, row_tokens=len(tokens))
