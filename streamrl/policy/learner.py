"""One trainer rank's share of an optimizer step: forward, loss, backward, clip, update (C1, C8, C9).

Knows nothing of actors or the event loop: ``step`` blocks and is called on a worker thread. Where the ranks act as one,
every method marked *collective* must be called by all of them in the same order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from streamrl.errors import ConfigError, DivergedError, StalenessError
from streamrl.lora import without_adapters
from streamrl.loss.diagnostics import Diagnostics
from streamrl.loss.head import HeadForm
from streamrl.loss.logprobs import TokenLogprobs, token_logprobs
from streamrl.loss.truncation import Truncation
from streamrl.objective_checks import recomputes
from streamrl.policy.optimizer import clip_gradients, gradient_norm, learning_rate, make_optimizer
from streamrl.policy.packing import Packed, pack
from streamrl.policy.parallel import accumulate_only, full_parameters, reshard, shard
from streamrl.policy.precision import compute_dtype, forward
from streamrl.policy.reference import columns_of, delivered, frozen_copy, is_base
from streamrl.policy.step_loss import MicroBatch, StepLoss, environments, split
from streamrl.policy.trained import sent_parameters
from streamrl.schema import Config
from streamrl.types import RankBatch, TrainGroup, Trajectory

ROW_PER_HIDDEN = 6
"""In a layer of width H a row of L tokens costs about 4·L²·H in attention and 24·L·H² elsewhere: equal at L = 6·H."""


class PackedPolicy(nn.Module):
    """A transformers causal LM as a function from packed rows to the log-probs of their targets."""

    def __init__(self, model: Any, head_dtype: str = "float32") -> None:
        super().__init__()
        self.model = model
        self._form = HeadForm.of(model.config, head_dtype)

    def forward(self, packed: Packed, temperature: float, truncation: Truncation | None = None) -> tuple[Tensor, ...]:
        """``TokenLogprobs`` ``[N]`` of ``packed.target``; the head runs on the N source tokens only."""
        return self._logprobs(self._hidden(packed), packed, temperature, truncation)

    def _hidden(self, packed: Packed) -> Tensor:
        body = self.model.get_decoder()(
            input_ids=packed.tokens,
            attention_mask=packed.attention_mask(),
            position_ids=packed.positions,
            use_cache=False,
        )
        return body.last_hidden_state.flatten(0, 1).index_select(0, packed.source)

    def _logprobs(
        self, hidden: Tensor, packed: Packed, temperature: float, truncation: Truncation | None
    ) -> TokenLogprobs:
        head = self.model.get_output_embeddings()
        bias = getattr(head, "bias", None)
        return token_logprobs(
            hidden, head.weight, packed.target, temperature, bias, form=self._form, truncation=truncation
        )


class ActorCritic(PackedPolicy):
    """The same with a linear head, 0 at the start, that reads the value of the state before each target."""

    def __init__(self, model: Any, head_dtype: str = "float32") -> None:
        super().__init__(model, head_dtype)
        device = next(model.parameters()).device
        self.value = nn.Linear(model.config.hidden_size, 1, device=device, dtype=torch.float32)
        nn.init.zeros_(self.value.weight)
        nn.init.zeros_(self.value.bias)

    def forward(self, packed: Packed, temperature: float, truncation: Truncation | None = None) -> tuple[Tensor, ...]:
        """``TokenLogprobs`` and value float32 ``[N]``."""
        hidden = self._hidden(packed)
        return *self._logprobs(hidden, packed, temperature, truncation), self.value(hidden.float()).squeeze(1)


class Learner:
    """Owns the policy's parameters on this rank, their gradients and the optimizer.

    ``model`` (``trained.load_trained``) is a transformers causal LM with sdpa attention, equal on all ranks, with what
    is trained in float32; with a ``mesh`` of more than one rank it is sharded in place. It computes in ``model.dtype``
    (``precision.py``). ``updates`` counts batches and drives the schedule; a restart sets it and the optimizer.
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
        self._dtype = compute_dtype(config.model.dtype)
        self._truncation = Truncation.of(config.sampling)
        kind = ActorCritic if config.loss.advantage == "gae" else PackedPolicy
        self._policy = kind(model, config.model.head_dtype)
        self._loss = StepLoss(config.loss)
        frozen = frozen_copy(config, model)
        self._reference = None if frozen is None else PackedPolicy(frozen, config.model.head_dtype)
        self._referring: Callable[[], AbstractContextManager[None]] = nullcontext
        """What the policy has to be in to be the reference."""
        self._rank, self._ranks, self._group = 0, 1, None
        if mesh is not None and mesh.size() > 1:
            self._rank, self._ranks, self._group = mesh.get_local_rank(), mesh.size(), mesh.get_group()
            shard(self._policy, model.get_decoder().layers, mesh, self._dtype)
            if self._reference is not None:
                shard(self._reference, self._reference.model.get_decoder().layers, mesh, self._dtype)
        if is_base(config):
            self._reference, self._referring = self._policy, partial(without_adapters, model)
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

    def score(
        self, token_ids: Sequence[int] | np.ndarray, temperature: float = 1.0, truncation: Truncation | None = None
    ) -> np.ndarray:
        """Log-probs float32 ``[T]`` of each token given those before it, the first 0. Collective.

        Without ``truncation`` as ``Engine.score``; with it those of sampled tokens, as ``Engine.generate`` gives them.
        """
        return self.score_all([token_ids], temperature, truncation)[0]

    def score_all(
        self,
        rows: Sequence[Sequence[int] | np.ndarray],
        temperature: float = 1.0,
        truncation: Truncation | None = None,
    ) -> list[np.ndarray]:
        """``score`` of each row, many in one pass: at most ``trainer.token_budget`` tokens. Collective."""
        tokens = [np.asarray(row, dtype=np.int32) for row in rows]
        scores = [np.zeros(len(row), dtype=np.float32) for row in tokens]
        for part in _parts([len(row) for row in tokens], self.config.trainer.token_budget):
            with torch.no_grad():
                packed = _scoring([tokens[index] for index in part], self._row_tokens).to(self._device)
                logprobs, *_ = forward(self._policy, self._dtype, packed, temperature, truncation)
            reshard(self._policy)
            ends = np.cumsum([len(tokens[index]) - 1 for index in part])[:-1]
            for index, own in zip(part, np.split(logprobs.cpu().numpy(), ends), strict=True):
                scores[index][1:] = own
        return scores

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """``(name, full tensor)`` of what engines get, in ``model.dtype``, one by one. Collective."""
        return full_parameters(sent_parameters(self.model).items(), self._dtype)

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
        every, temperature = [micro for part in parts for micro in part], self.config.sampling.temperature
        with torch.no_grad():
            if recomputes(self.config.loss):
                for micro in every:
                    found = forward(self._policy, self._dtype, micro.packed, temperature, self._truncation)
                    micro.proximal, _, micro.outside, *values = found
                    if values:
                        (micro.values,) = values
                reshard(self._policy)
            if self._reference is not None:
                with self._referring():
                    for micro in every:
                        # Not truncated: KL(π‖π_ref) needs π_ref to be positive wherever π samples (docs/numerics.md).
                        micro.reference = forward(self._reference, self._dtype, micro.packed, temperature)[0]
                reshard(self._reference)
        self._loss.estimate(every, self._group)
        self._loss.renormalise(every, self._group)
        return self._loss.statistics(every, self._group)

    def _forward_backward(
        self, part: list[MicroBatch], statistics: Mapping[str, Tensor] | None, diagnostics: Diagnostics
    ) -> None:
        updates = self.config.loss.updates_per_batch
        for index, micro in enumerate(part, start=1):
            accumulate_only(self._policy, on=index < len(part))
            temperature = self.config.sampling.temperature
            found = forward(self._policy, self._dtype, micro.packed, temperature, self._truncation)
            logprobs, entropy, outside, *values = found
            result, columns = self._loss(micro, logprobs, statistics, *values)
            # Of several updates each stands for the whole batch. An empty micro-batch goes all the way too: the other
            # ranks wait for this one in the collectives.
            (updates * result.loss).backward()
            packed = micro.packed
            before = logprobs.detach() if micro.proximal is None else micro.proximal
            outside = outside if micro.outside is None else micro.outside
            aged = packed.lag > 0
            if self.config.engine.kv == "keep":
                aged |= packed.carried
            columns |= {"fresh_outside": outside & ~aged, "aged_outside": outside & aged}
            diagnostics.add(result, entropy, packed.lag, aged, before, packed.masked_tokens, micro.envs, columns)

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


def _parts(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Indices of rows with anything to score, in order, dealt to passes of at most ``most`` tokens."""
    parts: list[list[int]] = []
    room = 0
    for index, length in enumerate(lengths):
        if length < 2:
            continue
        if not parts or length > room:
            parts.append([])
            room = most
        parts[-1].append(index)
        room -= length
    return parts


def _scoring(rows: Sequence[np.ndarray], row_tokens: int) -> Packed:
    """Every token of each row but the first as a target."""
    groups = []
    for tokens in rows:
        sampled = np.arange(len(tokens)) > 0
        trajectory = Trajectory(tokens, sampled, np.zeros(len(tokens), np.float32), [(0, len(tokens) - 1)])
        groups.append(TrainGroup(0, "", [trajectory], np.zeros(1), np.zeros(1)))
    return pack(groups, version=0, oldest_allowed=0, row_tokens=row_tokens)
