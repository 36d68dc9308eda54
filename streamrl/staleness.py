"""The rules of bounded lag (C1) as pure functions: pacing, the guarantee, and when ``on_stale: wait`` has to wait.

Words: G is ``groups_per_step``, L is ``max_lag``, v the trainer's version (so v·G groups are consumed), P the
*published* version: the newest one that **every** live rollouter has committed, −1 before the first. Always P <= v.

Pacing saves work: it keeps most groups inside the bound. It proves nothing about a slow group, which the guarantee
(``oldest_allowed``, checked at hand-out and again by the trainer) covers.

**Pacing.** A lease is granted while ``granted_net < (P + L + 1)·G``, where ``granted_net = issued − refunded`` counts
consumed groups too. Credits are thus freed by publication and not by the optimizer step: a group that is granted at P
is sampled by version P or newer from its first token, because its holder had committed P before P was published.

    Claim: in_flight + ready <= (L + 1)·G. Proof: granted_net only grows by a grant, P only grows, so granted_net <=
    (P + L + 1)·G always. in_flight + ready = granted_net − consumed <= (P + L + 1)·G − v·G <= (L + 1)·G, as P <= v. ∎

With L = 0 a lease is granted only while fewer than (P + 1)·G are; if P < v all of those are consumed already. So every
group is granted at P = v and consumed at v: exact on-policy needs no rule of its own.

**Replay.** With E = ``epochs_per_group`` uses of every group, a step takes G uses of G different groups. The budget
then counts uses: ``granted_net·E <= (P + L + 1)·G + F``, where F are the uses that groups
forfeited by growing too old, less the places in batches that dropped groups left empty.

    Claim: with E <= L + 1 the trainer never starves. Proof: at P = v the uses spent are v·G, so when credits have run
    out the outstanding groups have more than (v + L + 1)·G + F − E − v·G − F = (L + 1)·G − E uses left. A group has at
    most E of them, so more than (L + 1)·G/E − 1 >= G − 1 different groups are outstanding: at least G. ∎

With E > L + 1 a group would be over the bound before its last use; such settings are refused. ``wait`` with E > 1 is
refused too: a group with uses left would be due again and again, which (*) below does not count.

**Waiting.** A group granted at P holds no token older than P, so it is trainable up to version P + L, its *due*
version. Under ``wait`` no group may miss its due version. It is not enough to include the groups that are due now:
with L = 2, G = 1 leases a, b, c are granted at P = 0 and due at 2; if c is trained at 0 and a newer d at 1, nothing
was due yet, and a and b no longer fit into the one batch at 2. ``may_hand_out`` therefore demands, for the groups that
*remain* after the batch of version v,

    (*)  for every d >= v:  #{remaining groups due at d or before} <= (d − v)·G,

that is, the steps v+1 … d have room for them; d = v says that everything due now is in the batch.

    Claim: earliest-due-first batches satisfy (*) at the latest when every outstanding group is ready; the trainer waits
    only for groups in flight, and each of those ends by delivery, failure or its deadline: no deadlock, no stale group.
    Proof: let N(d) count outstanding groups due at d or before, and assume (**) N(d) <= (d + 1 − v)·G for all d >= v
    while the trainer is at v. At the start nothing is outstanding. A grant at P is due at P + L and keeps (**): for d
    >= P + L, N(d) <= all outstanding = granted_net − v·G <= (P + L + 1 − v)·G <= (d + 1 − v)·G. Delivery, refund (a
    re-issued prompt starts afresh and holds no token) only lower N. Earliest-due-first with all groups ready leaves
    max(0, N(d) − G) <= (d − v)·G, which is (*). After a batch that satisfies (*), at v + 1: N(d) <= (d − v)·G =
    (d + 1 − (v + 1))·G, which is (**) again. ∎

Earliest due first among the ready groups minimises every count in (*) at once, so if that choice does not satisfy it no
other choice does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import StrEnum


class OnStale(StrEnum):
    """What happens to a group with tokens over the bound."""

    MASK = "mask"
    """Too-old tokens lose their loss weight; a group without a fresh token is evicted."""
    EVICT = "evict"
    """The group is dropped and its prompt is issued again."""
    WAIT = "wait"
    """The trainer waits, so that no group goes over the bound."""


def credits(
    granted_net: int, published: int, max_lag: int, groups_per_step: int, epochs: int = 1, forfeited: int = 0
) -> int:
    """Leases that pacing allows now; 0 before version 0 is published (``published = −1``).

    ``epochs`` are the uses of a group (E), ``forfeited`` the uses that were lost to age so far (F).
    """
    if published < 0:
        return 0
    return max(0, ((published + max_lag + 1) * groups_per_step + forfeited) // epochs - granted_net)


def oldest_allowed(version: int, max_lag: int) -> int:
    """Oldest version whose tokens the trainer may train on while it is at ``version``."""
    return version - max_lag


def may_hand_out(version: int, max_lag: int, groups_per_step: int, remaining: Iterable[int]) -> bool:
    """Whether, under ``wait``, a batch for ``version`` leaves no group behind that would miss its due version: (*).

    ``remaining`` holds, for each outstanding group that is not in the batch, the oldest version of its tokens (ready)
    or the published version when its lease was granted (in flight).
    """
    due = Counter(oldest + max_lag for oldest in remaining)
    total = 0
    for deadline in sorted(due):
        total += due[deadline]
        if total > (deadline - version) * groups_per_step:
            return False
    return True
