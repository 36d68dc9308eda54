"""Several hosts on one machine, and a note of who read which bucket from whom."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import pytest

from streamrl.sync import link
from streamrl.sync.transports.host_share import HOST_VARIABLE
from streamrl.sync.transports.nixl_memory import Pull
from streamrl.sync.transports.nixl_pull import TRAINER

Reads = dict[tuple[str, str], list[int]]
"""Buckets in order, by member and whose memory they were read in: ``trainer`` or ``host``; reads that failed too."""


def on_hosts(monkeypatch: pytest.MonkeyPatch, hosts: Mapping[str, str]) -> None:
    """Members count to these hosts; all others, and the trainer, to this one."""
    make = link.make_receiver

    def made(*arguments: Any, member: str, **settings: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setenv(HOST_VARIABLE, hosts.get(member, ""))
            return make(*arguments, member=member, **settings)

    monkeypatch.setattr(link, "make_receiver", made)


def note_reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    reads: Reads = defaultdict(list)
    fetch = Pull.fetch

    def noting(self: Any, owner: Any, bucket: Any, *arguments: Any) -> None:
        reads[self.name.partition("#")[0], "trainer" if owner.name == TRAINER else "host"].append(bucket.index)
        fetch(self, owner, bucket, *arguments)

    monkeypatch.setattr(Pull, "fetch", noting)
    return reads
