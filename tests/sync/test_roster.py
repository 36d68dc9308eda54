"""Which process counts under a name."""

from __future__ import annotations

import pytest

from streamrl.errors import WireError
from streamrl.sync import messages as wire
from streamrl.sync.roster import Roster


def greet(roster: Roster, incarnation: int) -> bool:
    hello = wire.Hello(name="rollouter-0", pid=1, incarnation=incarnation)
    return roster.greet(wire.identity_of("rollouter-0", incarnation), hello)


def test_an_older_process_is_not_heard_once_its_successor_is_known() -> None:
    roster = Roster()
    assert greet(roster, 5)
    assert greet(roster, 9)
    assert not greet(roster, 5)
    assert roster.identity("rollouter-0") == wire.identity_of("rollouter-0", 9)
    assert roster.sender(wire.identity_of("rollouter-0", 5)) is None
    assert roster.sender(wire.identity_of("rollouter-0", 9)) == "rollouter-0"


def test_a_condemned_process_stays_out_and_its_successor_starts_without_weights() -> None:
    roster = Roster()
    greet(roster, 5)
    roster.serves("rollouter-0", 3)
    assert roster.condemn("rollouter-0")
    assert not roster.condemn("rollouter-0")
    assert not greet(roster, 5)
    assert not roster.reachable("rollouter-0")
    assert roster.sender(wire.identity_of("rollouter-0", 5)) is None
    assert greet(roster, 9)
    assert roster.reachable("rollouter-0")
    assert roster.version("rollouter-0") == -1


def test_a_process_that_reconnects_keeps_what_it_serves() -> None:
    roster = Roster()
    greet(roster, 5)
    roster.serves("rollouter-0", 3)
    roster.lost("rollouter-0")
    assert not roster.reachable("rollouter-0")
    assert greet(roster, 5)
    assert roster.reachable("rollouter-0")
    assert roster.version("rollouter-0") == 3


def test_a_hello_in_another_name_is_malformed() -> None:
    hello = wire.Hello(name="rollouter-1", pid=1, incarnation=5)
    with pytest.raises(WireError, match="rollouter-0#0+5 says that it is 'rollouter-1'"):
        Roster().greet(wire.identity_of("rollouter-0", 5), hello)
