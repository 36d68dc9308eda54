"""The ``streamrl`` command. Heavy imports happen inside the commands, so that ``--help`` answers at once."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from streamrl import __version__
from streamrl.errors import ConfigError, StreamRLError


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command and exit: 0 completed, 1 failed, 2 bad arguments or config, 3 parity gate, 130 interrupted."""
    parser = build_parser()
    arguments, rest = parser.parse_known_args(argv)
    takes_settings = arguments.run in (_launch, _replay, _parity, _attach, _env_check)
    if rest and (not takes_settings or any(text.startswith("-") for text in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides += rest  # key=value after a flag: argparse closes a positional list at the first flag
    try:
        sys.exit(arguments.run(arguments))
    except ConfigError as error:
        print(f"streamrl: {error}", file=sys.stderr)
        sys.exit(2)
    except StreamRLError as error:
        print(f"streamrl: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:  # before the run had its own handler
        sys.exit(130)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="streamrl", description="Asynchronous reinforcement learning that post-trains language models."
    )
    parser.add_argument("--version", action="version", version=f"streamrl {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    launch = commands.add_parser("launch", help="run the ring: rollouters, buffer, trainers", allow_abbrev=False)
    launch.add_argument("--config", metavar="NAME|PATH", help="a shipped config (quickstart, base) or a YAML file")
    launch.add_argument("--trainers", type=int, metavar="N", help="trainer ranks")
    launch.add_argument("--rollouts", type=int, metavar="N", help="rollouters")
    launch.add_argument("--steps", type=int, metavar="N", help="optimizer steps")
    launch.add_argument("--run-dir", type=Path, metavar="DIR", help="run folder (default: runs/<name>-<time>)")
    launch.add_argument("--dry-run", action="store_true", help="print the resolved config, placement and bounds")
    launch.add_argument("overrides", nargs="*", metavar="key=value", help="settings, such as max_lag=2 loss=ppo")
    launch.set_defaults(run=_launch)
    replay = commands.add_parser("replay", help="train again on what a run trained on", allow_abbrev=False)
    replay.add_argument("recorded", type=Path, metavar="RUN", help="folder of a run with buffer.keep=all")
    replay.add_argument("--steps", type=int, metavar="N", help="only the first N optimizer steps")
    replay.add_argument("--run-dir", type=Path, metavar="DIR", help="run folder (default: runs/<name>-replay-<time>)")
    replay.add_argument("overrides", nargs="*", metavar="key=value", help="another loss.* or trainer.* setting")
    replay.set_defaults(run=_replay)
    parity = commands.add_parser(
        "parity", help="compare engines and trainer on log-probs, without training", allow_abbrev=False
    )
    parity.add_argument("--config", metavar="NAME|PATH", help="a shipped config (quickstart, base) or a YAML file")
    parity.add_argument("--run-dir", type=Path, metavar="DIR", help="run folder (default: runs/<name>-parity-<time>)")
    parity.add_argument("overrides", nargs="*", metavar="key=value", help="settings, such as engine=vllm rollouts=2")
    parity.set_defaults(run=_parity)
    attach = commands.add_parser("attach", help="play a run's leases in this process", allow_abbrev=False)
    attach.add_argument("--agent", default="", metavar="MODULE:NAME", help="environment to play (default: the run's)")
    attach.add_argument("--workers", type=int, default=8, metavar="N", help="leases played at once (default: 8)")
    attach.add_argument("--url", action="append", default=[], metavar="URL", help="a rollouter of a run elsewhere")
    attach.add_argument("--token", default="", metavar="TOKEN", help="of that run (default: $STREAMRL_TOKEN)")
    attach.add_argument("overrides", nargs="*", metavar="RUN|key=value", help="the run's folder; env.args.* settings")
    attach.set_defaults(run=_attach)
    env = commands.add_parser("env", help="look at an environment", allow_abbrev=False)
    check = env.add_subparsers(title="commands", required=True, metavar="COMMAND").add_parser(
        "check", help="play a few episodes and say what training would meet", allow_abbrev=False
    )
    check.add_argument("env", metavar="MODULE:NAME", help="the environment, such as riddles:Riddles")
    check.add_argument("--config", metavar="NAME|PATH", help="settings to check it under (default: base)")
    check.add_argument("--groups", type=int, default=4, metavar="N", help="prompts to play (default: 4)")
    check.add_argument("overrides", nargs="*", metavar="key=value", help="settings, such as env.args.highest=9")
    check.set_defaults(run=_env_check)
    bench = commands.add_parser("bench", help="measure, against a baseline in the same run", allow_abbrev=False)
    benches = bench.add_subparsers(title="benchmarks", required=True, metavar="NAME")
    engine = benches.add_parser("engine", help="the embedded engine against static generate of transformers")
    engine.set_defaults(run=_bench_engine)
    ring = benches.add_parser("ring", help="the whole ring at max_lag 0, 1 and 4")
    ring.add_argument("--runs", type=int, default=3, metavar="N", help="runs of each contender, in turn (default: 3)")
    ring.add_argument("--peer", action="append", default=[], choices=("trl",), help="also run this system")
    ring.set_defaults(run=_bench_ring)
    losses = benches.add_parser("losses", help="the quickstart with each loss, at several lags and seeds")
    losses.add_argument("--runs", type=int, default=3, metavar="N", help="seeds of each (default: 3)")
    losses.add_argument("--loss", action="append", metavar="NAME", help="only this loss; may be given again")
    losses.add_argument("--lag", action="append", type=int, metavar="N", help="only this max_lag; may be given again")
    losses.add_argument("--steps", type=int, metavar="N", help="optimizer steps (default: those of the quickstart)")
    losses.add_argument("--keep", type=Path, metavar="DIR", help="keep the runs here, go on where a sweep ended")
    losses.set_defaults(run=_bench_losses)
    steering = benches.add_parser("steering", help="the quickstart, stale, without and with staleness.target_ess")
    steering.add_argument("--runs", type=int, default=2, metavar="N", help="seeds of each target (default: 2)")
    steering.add_argument("--keep", type=Path, metavar="DIR", help="keep the runs here, go on where a sweep ended")
    steering.set_defaults(run=_bench_steering)
    queue = benches.add_parser("queue", help="the TransferQueue against plain pyzmq and other queues")
    queue.add_argument("--runs", type=int, default=3, metavar="N", help="runs of each contender, in turn (default: 3)")
    queue.add_argument("--seconds", type=float, default=3.0, metavar="S", help="of one run, about (default: 3)")
    queue.add_argument(
        "--only", choices=("throughput", "latency", "sizes", "memory"), help="this section alone (default: all)"
    )
    queue.add_argument(
        "--peer", action="append", default=[], choices=("mp", "redis", "ray", "transferqueue"), help="also run this one"
    )
    queue.set_defaults(run=_bench_queue)
    sync = benches.add_parser("sync", help="a weight update against copies, safetensors in /dev/shm, gloo per tensor")
    sync.add_argument("--runs", type=int, default=3, metavar="N", help="rounds of all contenders (default: 3)")
    sync.add_argument(
        "--size", action="append", choices=("0.02", "0.5", "2"), help="GB of weights (default: 0.5); may be given again"
    )
    sync.add_argument(
        "--only", choices=("update", "transports", "delta", "digest", "chain"), help="this section alone (default: all)"
    )
    sync.set_defaults(run=_bench_sync)
    proxy = benches.add_parser("proxy", help="agents over HTTP against the native API, 64 at once")
    proxy.add_argument("--runs", type=int, default=5, metavar="N", help="runs of each side, in turn (default: 5)")
    proxy.set_defaults(run=_bench_proxy)
    head = benches.add_parser("head", help="the trainer's log-probs: memory, time and error against plain autograd")
    head.add_argument("--runs", type=int, default=3, metavar="N", help="timed runs of each side, in turn (default: 3)")
    head.set_defaults(run=_bench_head)
    for each in (engine, ring, losses, steering, queue, proxy, sync, head):
        each.add_argument("--json", type=Path, metavar="FILE", help="also write the rows here")
    return parser


def _launch(arguments: argparse.Namespace) -> int:
    from streamrl.config import load_config

    flags = {key: getattr(arguments, key) for key in ("trainers", "rollouts", "steps")}
    config = load_config(
        arguments.config, arguments.overrides, {key: value for key, value in flags.items() if value is not None}
    )
    from streamrl.launching import dry_run, launch

    return dry_run(config) if arguments.dry_run else launch(config, arguments.run_dir)


def _replay(arguments: argparse.Namespace) -> int:
    from streamrl.launching import replay

    return replay(arguments.recorded, arguments.overrides, arguments.steps, arguments.run_dir)


def _parity(arguments: argparse.Namespace) -> int:
    from streamrl.config import load_config

    config = load_config(arguments.config, arguments.overrides)
    from streamrl.launching import parity

    return parity(config, arguments.run_dir)


def _attach(arguments: argparse.Namespace) -> int:
    from streamrl.attaching import attach

    folders = [text for text in arguments.overrides if "=" not in text]
    if len(folders) > 1:
        raise ConfigError(f"attach takes one run folder, got {' and '.join(folders)}")
    run_dir = Path(folders[0]) if folders else None
    overrides = [text for text in arguments.overrides if text not in folders]
    return attach(run_dir, arguments.url, arguments.token, arguments.agent, arguments.workers, overrides)


def _env_check(arguments: argparse.Namespace) -> int:
    from streamrl.config import load_config

    if arguments.groups < 1:
        raise ConfigError(f"--groups {arguments.groups}: must be at least 1")
    config = load_config(arguments.config, [f"env={arguments.env}", *arguments.overrides])
    from streamrl.envs.environment import load_environment

    environment = load_environment(config)  # what is wrong with it is said before torch is imported
    from streamrl.checking import check

    return check(environment, config, arguments.groups)


def _bench_engine(arguments: argparse.Namespace) -> int:
    from streamrl.bench import engine

    engine.run(arguments.json)
    return 0


def _bench_queue(arguments: argparse.Namespace) -> int:
    from streamrl.bench.queue import command

    if arguments.runs < 1 or arguments.seconds <= 0:
        raise ConfigError(f"--runs {arguments.runs} --seconds {arguments.seconds:g}: both must be positive")
    command.run(arguments.json, arguments.peer, arguments.runs, arguments.only, arguments.seconds)
    return 0


def _bench_ring(arguments: argparse.Namespace) -> int:
    from streamrl.bench import ring

    if arguments.runs < 1:
        raise ConfigError(f"--runs {arguments.runs}: must be at least 1")
    ring.run(arguments.json, arguments.peer, arguments.runs)
    return 0


def _bench_proxy(arguments: argparse.Namespace) -> int:
    from streamrl.bench import proxy

    if arguments.runs < 1:
        raise ConfigError(f"--runs {arguments.runs}: must be at least 1")
    proxy.run(arguments.json, arguments.runs)
    return 0


def _bench_sync(arguments: argparse.Namespace) -> int:
    from streamrl.bench.sync import command

    if arguments.runs < 1:
        raise ConfigError(f"--runs {arguments.runs}: must be at least 1")
    command.run(arguments.json, arguments.runs, arguments.size or ["0.5"], arguments.only)
    return 0


def _bench_head(arguments: argparse.Namespace) -> int:
    from streamrl.bench import head

    if arguments.runs < 1:
        raise ConfigError(f"--runs {arguments.runs}: must be at least 1")
    head.run(arguments.json, arguments.runs)
    return 0


def _bench_losses(arguments: argparse.Namespace) -> int:
    from streamrl.bench import losses
    from streamrl.config import load_config

    if arguments.runs < 1:
        raise ConfigError(f"--runs {arguments.runs}: must be at least 1")
    names, lags = arguments.loss or losses.LOSSES, arguments.lag or losses.LAGS
    for name in names:
        for lag in lags:
            load_config("quickstart", [f"loss={name}", f"max_lag={lag}"])
    losses.run(arguments.json, arguments.runs, names, lags, arguments.steps, arguments.keep)
    return 0


def _bench_steering(arguments: argparse.Namespace) -> int:
    from streamrl.bench import steering

    if arguments.runs < 1:
        raise ConfigError(f"--runs {arguments.runs}: must be at least 1")
    steering.run(arguments.json, arguments.runs, keep=arguments.keep)
    return 0


if __name__ == "__main__":
    main()
