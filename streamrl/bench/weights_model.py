"""How long a weight update takes on machines that are not here: a model of its stages, the table in docs/weights.md.

``python -m streamrl.bench.weights_model`` prints the table. Bytes per second go in, seconds come out; pure.
"""

from __future__ import annotations

from dataclasses import dataclass

MODELS = {"7B": 7e9, "70B": 70e9, "671B": 671e9}
"""Parameters, two bytes each on the wire."""
HOSTS = (8, 32, 256)
"""That hold engines."""


@dataclass(frozen=True)
class Rates:
    """Bytes per second of one stage on one host."""

    gather: float
    """Of rank 0, from its own shards and those of the other ranks into its slab."""
    digest: float
    """xxh3-64, by the one thread that does it."""
    network: float
    """One host's network interface, one way."""
    load: float
    """From host memory into the engine, over all devices of a host."""


@dataclass(frozen=True)
class Seconds:
    arrive: float
    """Until every host holds and has verified the version; engines generate."""
    pause: float
    """Of each engine."""


def update_seconds(nbytes: float, hosts: int, rates: Rates, *, copies_sent: int, bucket: float) -> Seconds:
    """One update of ``nbytes`` to engines on ``hosts`` hosts.

    ``copies_sent``: how often the trainer's host sends the model: ``hosts`` where each fetches it from there, 1 where
    they pass it on. Stages overlap bucket by bucket, so the slowest one counts, and the others for one bucket each.
    """
    stages = [rates.gather, rates.digest, rates.network / copies_sent, rates.digest]
    slowest = min(stages)
    arrive = nbytes / slowest + sum(bucket / rate for rate in stages) - bucket / slowest
    if copies_sent < hosts:
        arrive += (hosts - 1) * bucket / rates.network  # through all of them, one after the other
    return Seconds(arrive, nbytes / rates.load)


def table(rates: Rates, bucket: float = 64 << 20) -> str:
    """Markdown: seconds until a version has arrived, sent to each host or passed on, and the pause."""
    lines = ["| model | hosts | each fetches, s | passed on, s | pause, s |", "|---|---|---|---|---|"]
    for model, parameters in MODELS.items():
        for hosts in HOSTS:
            star, chain = (
                update_seconds(2 * parameters, hosts, rates, copies_sent=copies, bucket=bucket) for copies in (hosts, 1)
            )
            lines.append(f"| {model} | {hosts} | {star.arrive:.1f} | {chain.arrive:.1f} | {chain.pause:.2f} |")
    return "\n".join(lines)


ASSUMED = Rates(gather=5.4e9, digest=4.5e9, network=50e9, load=200e9)
"""What docs/weights.md says of them."""


if __name__ == "__main__":
    print(table(ASSUMED))
