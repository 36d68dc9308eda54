"""The model of an update against times worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.bench.weights_model import ASSUMED, Rates, table, update_seconds


def test_the_slowest_stage_counts_whole_and_the_others_for_one_bucket() -> None:
    rates = Rates(gather=10.0, digest=5.0, network=20.0, load=50.0)
    # 100 bytes at 5/s, then one bucket of 10 bytes: gathered 1 s, sent 0.5 s, digested once more 2 s
    seconds = update_seconds(100, 1, rates, copies_sent=1, bucket=10)
    assert seconds.arrive == pytest.approx(20 + 1 + 0.5 + 2)
    assert seconds.pause == pytest.approx(2.0)


def test_a_trainer_that_sends_every_copy_shares_its_interface_among_the_hosts() -> None:
    rates = Rates(gather=100.0, digest=100.0, network=20.0, load=50.0)
    star = update_seconds(100, 4, rates, copies_sent=4, bucket=1)
    assert star.arrive == pytest.approx(100 / 5 + 0.03)
    chain = update_seconds(100, 4, rates, copies_sent=1, bucket=1)
    assert chain.arrive == pytest.approx(100 / 20 + 0.03 + 3 * 0.05)


def test_the_table_in_the_docs_is_the_one_that_the_model_prints() -> None:
    page = Path(__file__).parents[2] / "docs" / "weights.md"
    assert table(ASSUMED) in page.read_text()
