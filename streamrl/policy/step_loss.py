"""The objective of one optimizer step on packed micro-batches: which log-probs it needs, and the loss of each part."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from streamrl.loss.advantages import WHITEN_EPSILON
from streamrl.loss.batch import LossBatch
from streamrl.loss.corrections import correct
from streamrl.loss.kl import kl_penalty, kl_terms
from streamrl.loss.policy import Evaluated, batch_statistics, evaluate, loss_params
from streamrl.loss.returns import gae
from streamrl.loss.value import value_loss
from streamrl.objective_checks import corrections_of, loss_settings
from streamrl.objectives import OBJECTIVES
from streamrl.policy.packing import Packed
from streamrl.policy.parallel import gather_rows
from streamrl.schema import LossConfig
from streamrl.types import TrainGroup


@dataclass
class MicroBatch:
    """A packed micro-batch of N trained tokens, and what is known of them before the update."""

    packed: Packed
    envs: Tensor
    """int64 ``[trajectories]``, index into the environments of the batch, −1 for none."""
    truncated: Tensor
    """bool ``[trajectories]``."""
    proximal: Tensor | None = None
    """float32 ``[N]``, log π_old, where the trainer recomputes it."""
    outside: Tensor | None = None
    """bool ``[N]``, with it: π_old's truncation would not have let the token be sampled."""
    reference: Tensor | None = None
    """float32 ``[N]``, log π_ref, where there is a reference policy."""
    values: Tensor | None = None
    """float32 ``[N]``, the value head before the update, where there is one."""
    returns: Tensor | None = None
    """float32 ``[N]``, what the value head should have said."""
    advantages: Tensor | None = None
    """float32 ``[N]``, by GAE; None: those of the trajectories."""
    scale: float = 1.0
    """Factor on the loss weights, the same for the whole batch."""


class StepLoss:
    """The settings of a run's loss, as a function of a micro-batch and its current log-probs.

    Raises ``ValueError`` for settings that ``check_objective`` would have refused.
    """

    def __init__(self, config: LossConfig) -> None:
        self.config = config
        self.params = loss_params(config.name, **(loss_settings(config) | config.args))
        self.corrections = corrections_of(config)

    def __call__(
        self,
        micro: MicroBatch,
        current: Tensor,
        statistics: Mapping[str, Tensor] | None,
        values: Tensor | None = None,
    ) -> tuple[Evaluated, dict[str, Tensor]]:
        """Loss with its KL and value terms, and columns ``[N]`` for ``Diagnostics.add``."""
        batch = dataclasses.replace(self._batch(micro, current), statistics=statistics)
        result = evaluate(self.config.name, batch, self.params, self.corrections)
        loss, columns, weights = result.loss, {}, micro.packed.token_weights * micro.scale
        if micro.reference is not None:
            kl = self.config.kl
            if kl.place == "loss":
                behaviour = batch.behaviour if kl.off_policy else None
                terms = kl_terms(current, micro.reference, kl.form, behaviour, kl.ratio_cap)
                loss = loss + kl.coefficient * (weights * terms).sum(dtype=torch.float64)
            columns["kl_reference"] = kl_terms(current.detach(), micro.reference, "k3")
        if values is not None:
            assert micro.values is not None
            assert micro.returns is not None
            errors = value_loss(values, micro.values, micro.returns, self.config.value.clip)
            loss = loss + self.config.value.coefficient * (weights * errors).sum(dtype=torch.float64)
            residual = micro.returns - micro.values
            columns |= {
                "value_loss": 0.5 * residual.square(),
                "return": micro.returns,
                "return_squared": micro.returns.double().square(),
                "residual": residual,
                "residual_squared": residual.double().square(),
            }
        return dataclasses.replace(result, loss=loss), columns

    def estimate(self, micro_batches: Sequence[MicroBatch], group: dist.ProcessGroup | None) -> None:
        """Fill in the advantages and returns of tokens where there are values. Collective where it whitens."""
        found = [micro for micro in micro_batches if micro.values is not None]
        if not found:
            return
        for micro in found:
            self._estimate(micro)
        if not self.config.value.whiten:
            return
        own = torch.cat([micro.advantages for micro in found if micro.advantages is not None]).double()
        every = gather_rows(own[:, None], group)[:, 0]
        if len(every) < 2:
            return
        mean, scale = every.mean(), torch.sqrt(every.var() + WHITEN_EPSILON)
        for micro in found:
            assert micro.advantages is not None
            micro.advantages = ((micro.advantages.double() - mean) / scale).float()

    def _estimate(self, micro: MicroBatch) -> None:
        """GAE from rewards less the KL penalty of each token.

        A turn's own reward comes at the last trained token of the turn, the rest at that of the trajectory.
        """
        packed, value = micro.packed, self.config.value
        assert micro.values is not None
        rewards = torch.zeros_like(micro.values, dtype=torch.float64)
        count = len(rewards)
        if count:
            last = torch.zeros(packed.trajectories, dtype=torch.int64, device=rewards.device)
            last.scatter_reduce_(0, packed.trajectory, torch.arange(count, device=rewards.device), "amax")
            ends = last[packed.trajectory.unique()]
            rewards[ends] = packed.advantages[ends].double()
            rewards += packed.reward_shift.double()
        if micro.reference is not None and self.config.kl.place == "reward":
            assert micro.proximal is not None
            rewards -= kl_penalty(micro.proximal, micro.reference, self.config.kl.coefficient)
        turns = -packed.turns_left.cpu().numpy() if value.step == "turn" else None
        advantages, returns = gae(
            rewards.cpu().numpy(),
            micro.values.double().cpu().numpy(),
            np.ones(count, dtype=bool),
            packed.trajectory.cpu().numpy(),
            value.gamma,
            value.lam,
            turns,
        )
        micro.advantages, micro.returns = (
            torch.from_numpy(array).float().to(rewards.device) for array in (advantages, returns)
        )

    def renormalise(self, micro_batches: Sequence[MicroBatch], group: dist.ProcessGroup | None) -> None:
        """Where it is asked for, give the weight of dropped and stale tokens to the rest of the batch. Collective."""
        if not self.corrections.renormalise:
            return
        whole, kept = 0.0, 0.0
        for micro in micro_batches:
            assert micro.proximal is not None
            weights = micro.packed.token_weights.double()
            dropped = correct(self._batch(micro, micro.proximal).cleaned(), self.corrections).dropped
            whole += float(weights.sum()) + micro.packed.masked_weight
            kept += float(weights[~dropped].sum())
        device = micro_batches[0].envs.device
        sums = gather_rows(torch.tensor([[whole, kept]], dtype=torch.float64, device=device), group).sum(0)
        for micro in micro_batches:
            micro.scale = float(sums[0] / sums[1]) if sums[1] > 0 else 1.0

    def statistics(
        self, micro_batches: Sequence[MicroBatch], group: dist.ProcessGroup | None
    ) -> Mapping[str, Tensor] | None:
        """What a batch-wide loss needs of the batch over all micro-batches and ranks, before the first update.

        Collective where there are several ranks and the loss is batch-wide; None for the others.
        """
        parts = [self._batch(micro, micro.proximal) for micro in micro_batches if micro.proximal is not None]
        if not parts or not _batch_wide(self.config.name):
            return None
        columns = [torch.stack([p.current, p.behaviour, p.advantages, p.anchor], dim=1).double() for p in parts]
        current, behaviour, advantages, anchor = gather_rows(torch.cat(columns), group).unbind(1)
        ones = torch.ones(len(current), dtype=torch.bool, device=current.device)
        whole = LossBatch(current, behaviour, advantages, ones, ones.long() * 0, proximal=anchor, sequences=1)
        return batch_statistics(self.config.name, whole, self.params)

    def _batch(self, micro: MicroBatch, current: Tensor) -> LossBatch:
        packed, advantages = micro.packed, micro.advantages
        if advantages is None:
            advantages = packed.advantages * self.config.turn_discount**packed.turns_left
        if micro.reference is not None and self.config.kl.place == "reward" and micro.advantages is None:
            before = current if micro.proximal is None else micro.proximal
            advantages = advantages - kl_penalty(before, micro.reference, self.config.kl.coefficient)
        if self.config.mask_truncated:
            advantages = torch.where(micro.truncated[packed.trajectory], 0.0, advantages)
        return LossBatch(
            current=current,
            behaviour=packed.behaviour,
            advantages=advantages,
            mask=torch.ones_like(packed.behaviour, dtype=torch.bool),
            segments=packed.trajectory,
            proximal=micro.proximal if self.config.proximal == "recompute" else None,
            weights=packed.token_weights * micro.scale,
            sequences=packed.trajectories,
        )


def split(micro_batches: Sequence[list[TrainGroup]], updates: int) -> list[list[list[TrainGroup]]]:
    """A rank's micro-batches dealt to ``updates`` optimizer steps, by lease.

    Leases are numbered in a row, so that the shares are about equal, and which step a group takes part in depends
    neither on the rank it went to nor on its micro-batch. Every step gets as many micro-batches as there are, some of
    them empty, so that all ranks stay in step.
    """
    return [
        [[group for group in groups if group.lease % updates == part] for groups in micro_batches]
        for part in range(updates)
    ]


def environments(stats: Mapping[str, float]) -> list[str]:
    """The environments of a run, from the batch's numbers, which are equal on all ranks."""
    names = (key.split("/") for key in stats)
    return sorted(parts[1] for parts in names if len(parts) == 3 and (parts[0], parts[2]) == ("reward", "mean"))


def _batch_wide(name: str) -> bool:
    return name in OBJECTIVES and OBJECTIVES[name].batch_wide
