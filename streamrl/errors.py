"""Every error that streamrl raises on purpose, in one tree.

::

    StreamRLError
    ├── ConfigError (ValueError)        the user's settings cannot be run; exit code 2
    ├── EnvironmentFailed               user environment code failed too often; the run ends
    ├── ParityError                     engine and trainer disagree on log-probs; exit code 3
    ├── ReferenceLost                   a payload in a rollouter's arena cannot be read any more
    ├── JournalError                    the buffer's journal cannot be written, or what it holds cannot be read
    ├── WireError (ValueError)          a frame that does not follow the schema; counted, never fatal
    ├── StalenessError (AssertionError) a token over the lag bound reached the loss: our bug
    ├── DivergedError (ArithmeticError) NaN or infinite loss, gradient or weights
    ├── WeightSyncError                 a weight update could not be staged, verified or committed
    ├── EngineLost                      the process of a shared engine died with a request; the group is played again
    ├── DeadlineExceeded (TimeoutError) a wait ran out; the message says what it waited for
    └── ActorDied                       a process of the ring ended when it should not have

Messages say what was expected, what came, where, and the way out, in one line. All of them pickle.
"""

from __future__ import annotations


class StreamRLError(Exception):
    """Root of the tree: catch this to catch everything that streamrl raises on purpose."""


class ConfigError(StreamRLError, ValueError):
    """Settings that cannot be run: unknown key, ill-typed value, or a contradiction."""


class EnvironmentFailed(StreamRLError):
    """User environment code failed so often that going on would only hide it."""


class ParityError(StreamRLError):
    """Engine and trainer give different log-probs for the same tokens and weights."""


class WireError(StreamRLError, ValueError):
    """A message that does not follow the wire schema (see ``buffers/wire/codec.py``)."""


class JournalError(StreamRLError):
    """The journal cannot be opened, written, made durable or read; the message says which and what to do."""


class StalenessError(StreamRLError, AssertionError):
    """A token with lag over the bound reached the loss; the buffer should have stopped it."""


class DivergedError(StreamRLError, ArithmeticError):
    """The loss, a gradient or a weight is not finite."""


class WeightSyncError(StreamRLError):
    """A weight update failed; the old weights keep serving."""


class EngineLost(StreamRLError):
    """The engines that a request was sent to died with it; its group is played again."""


class DeadlineExceeded(StreamRLError, TimeoutError):
    """A wait ran out of time; the message names what was waited for."""


class ActorDied(StreamRLError):
    """A process of the ring ended when it should not have."""
