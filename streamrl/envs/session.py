"""The ``policy`` of one episode: it samples for user code and records every token exactly.

Text that the environment gives is encoded once and appended; tokens that the policy sampled stay as sampled, the end
token included. Nothing is ever decoded and encoded again, so what the trainer sees is what the engine saw.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from numbers import Real
from typing import Any

from streamrl.envs.chat.alignment import Plan
from streamrl.envs.chat.capture import Capture, ChatTurn
from streamrl.envs.chat.completions import TextCapture, TextTurn
from streamrl.envs.clipping import clip
from streamrl.envs.environment import Completion, Reward
from streamrl.envs.episode import Branch, Episode
from streamrl.envs.returned import checked_reward
from streamrl.envs.stops import cut, stop_strings
from streamrl.envs.transcript import Turn
from streamrl.errors import EnvironmentFailed


class Session:
    """What user code calls ``policy``: one line of an episode. Calls of one session run one after the other."""

    def __init__(self, episode: Episode, branch: Branch | None = None, parent: Session | None = None) -> None:
        """``branch``: None for the one that the episode began with. ``parent``: the session that it was made from."""
        self.episode = episode
        self._branch = branch or episode.branches[0]
        self._chats: Capture | None = parent._chats.branch(self._branch) if parent and parent._chats else None
        self._texts = TextCapture(episode.codec, self._branch)

    async def complete(
        self, prompt: str | Sequence[int], max_tokens: int | None = None, stop: str | Iterable[str] | None = None
    ) -> Completion:
        """Append ``prompt``, a text or token ids, to the transcript and sample the next turn.

        ``max_tokens`` lowers ``sampling.max_tokens`` for this turn; ``model.max_length`` shortens both. ``stop`` are
        strings that end the turn beside the tokenizer's end token. What was sampled stays in the transcript, the stop
        string included; the text that is returned ends before it. A call that raises or is cancelled leaves the
        transcript as it was.

        Raises ``ContextFull`` when there is no room for one sampled token, ``ValueError`` for arguments that cannot
        be used, ``RuntimeError`` for a call during another one or after the episode.
        """
        codec, branch = self.episode.codec, self._branch
        generation = (await branch.sample(branch.current, codec.context(prompt), max_tokens, stop)).generation
        token_ids = tuple(generation.token_ids.tolist())
        logprobs = tuple(generation.logprobs.tolist())
        return Completion(cut(codec.decode(token_ids), stop), token_ids, generation.finish_reason, logprobs)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
        stop: str | Iterable[str] | None = None,
    ) -> ChatTurn:
        """Answer a whole history of messages, as OpenAI's clients send it; ``max_tokens`` and ``stop`` as above.

        What the history shares with earlier ones is not encoded again (``chat.capture``): the same and more goes on
        with its transcript, another history is a trajectory of its own. Calls may run at the same time.

        Raises as ``complete`` does, and ``ConfigError`` where the tokenizer has no chat template that can be used.
        """
        codec = self.episode.codec
        if self._chats is None:
            self._chats = Capture(codec.template, self._branch)
        stops = stop_strings(stop)
        plan = self._chats.plan(messages, tools)
        turn = await self._sampled(plan, max_tokens, (*stops, *codec.chat_ends))
        return self._chats.record(plan, turn, stops)

    async def resume(
        self, prompt: str | Sequence[int], max_tokens: int | None = None, stop: str | Iterable[str] | None = None
    ) -> TextTurn:
        """As ``complete``, but ``prompt`` is the whole text, or all token ids, every time (``chat.completions``)."""
        stops = stop_strings(stop)
        plan = self._texts.plan_text(prompt)
        return self._texts.record(plan, await self._sampled(plan, max_tokens, stops), stops)

    def branch(self) -> Session:
        """A session that goes on from here beside this one, as a trajectory of its own of the same episode.

        What was sampled so far is context there, so that it is trained once.
        """
        return Session(self.episode, self._branch.branch(), self)

    async def _sampled(self, plan: Plan, max_tokens: int | None, stops: tuple[str, ...]) -> Turn:
        turn = await self._branch.sample(plan.transcript, plan.context, max_tokens, stops, plan.keep)
        self.episode.matched[plan.kind.value] += 1
        return turn

    def reward(self, value: float) -> None:
        """Add ``value`` to the turn that this session sampled last.

        Raises ``ValueError`` where it is no finite number or nothing was sampled.
        """
        if not isinstance(value, Real) or not math.isfinite(value):
            raise ValueError(f"policy.reward: expected a finite number, got {value!r:.80}")
        self._branch.reward(float(value))

    def finish(self, reward: float | Reward) -> None:
        """End this branch with a reward of its own, which stands for that of the episode. It samples no more.

        Branches made from it that were not finished themselves are worth the same. Raises ``ValueError`` for a reward
        that cannot be used.
        """
        try:
            self._branch.own_reward = checked_reward(reward)
        except EnvironmentFailed as error:
            raise ValueError(f"policy.finish: {error}") from None

    async def clip(self, text: str, tokens: int) -> str:
        """``text`` in at most ``tokens`` tokens: where it has more, its middle is replaced by a mark."""
        return clip(text, tokens, self.episode.codec.tokenizer)

    @property
    def base_url(self) -> str:
        """Where an OpenAI- or Anthropic-compatible client reaches this session."""
        return self._endpoint[0]

    @property
    def api_key(self) -> str:
        """The key of this session for such a client; it is good until the episode ends."""
        return self._endpoint[1]

    @cached_property
    def _endpoint(self) -> tuple[str, str]:
        return self.episode.serve(self)
