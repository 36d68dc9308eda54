"""Adapters over two ranks: real processes over gloo; numbers, gradients and weights are those of one rank."""

import multiprocessing
import time
import traceback
from pathlib import Path

import pytest
import torch
from learner_cases import batch, distance, trajectory, varied_groups
from lora_cases import adapted_model, lora_settings
from torch.distributed.tensor import DTensor

from streamrl.config import load_config
from streamrl.lora import adapter_parameters
from streamrl.parity.records import Asked, Semantics
from streamrl.policy.learner import Learner
from streamrl.policy.parallel import close_ranks, init_ranks
from streamrl.policy.parity import answer
from streamrl.policy.trained import as_sent, sent_parameters
from streamrl.sync.arena import Filling, describe
from streamrl.sync.gather import gather
from streamrl.sync.manifest import plan_manifest
from streamrl.sync.staging import slot_memory

DEADLINE_S = 120.0
DTYPES = ("float32", "bfloat16")
LOSS = ["loss=sapo", "loss.advantage=gae", "loss.kl.coefficient=0.1", "loss.kl.reference=initial"]
"""A value head, and the base as reference."""


def observe(mesh, rank: int, dtype: str) -> dict:
    config = lora_settings(eps=0.1)
    config.model.dtype = dtype
    config.loss = load_config(None, LOSS).loss
    model = adapted_model(config)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(getattr(torch, dtype))
    learner = Learner(config, model, mesh)
    groups = varied_groups()
    for lease, each in enumerate(groups):
        each.lease = lease
    halves = [[groups[:1], []], [groups[1:4], groups[4:]]]
    metrics = {}
    for version in (5, 6):
        own = [*halves[0], *halves[1]] if mesh is None else halves[rank]
        metrics = learner.step(batch(*own, version=version))
    manifest = plan_manifest(describe(as_sent(model, dtype)), 1 << 10)
    memory = slot_memory(manifest) if rank == 0 else None
    filling = None if memory is None else Filling(manifest, memory, lambda _: None)
    gather(sent_parameters(model).items(), manifest, filling)
    return {
        "metrics": {name: value for name, value in metrics.items() if not name.startswith("time/")},
        "scores": torch.tensor(learner.score(trajectory("abcdef", "ghij").tokens)),
        "rehearsed": torch.tensor(answer(learner, [Asked(list(range(1, 12)), Semantics(), True)]).rows),
        "sent": {name: tensor.clone() for name, tensor in learner.full_parameters()},
        "slot": None if memory is None else {t.name: bytes(memory[t.offset :][: t.nbytes]) for t in manifest.tensors},
        "masters": {local(p).dtype for p in adapter_parameters(model).values()},
        "base": {local(p).dtype for p in model.parameters() if not p.requires_grad},
        "sharded": {isinstance(parameter, DTensor) for parameter in model.parameters()},
    }


def local(parameter):
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def work(rank: int, folder: Path) -> None:
    try:
        torch.set_num_threads(1)
        mesh = init_ranks(rank, 2, folder / "store", timeout_s=DEADLINE_S / 2)
        torch.save({dtype: observe(mesh, rank, dtype) for dtype in DTYPES}, folder / f"rank-{rank}.pt")
        close_ranks()
    except BaseException:
        (folder / f"rank-{rank}.error").write_text(traceback.format_exc())
        raise


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What one rank sees alone, then what each of two sees, by dtype."""
    folder = tmp_path_factory.mktemp("lora-ranks")
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=work, args=(rank, folder), daemon=True) for rank in range(2)]
    deadline = time.monotonic() + DEADLINE_S
    try:
        for process in processes:
            process.start()
        alone = {dtype: observe(None, 0, dtype) for dtype in DTYPES}
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
    finally:
        for process in processes:
            process.kill()
            process.join()
    errors = [path.read_text() for path in sorted(folder.glob("*.error"))]
    assert not errors, "\n".join(errors)
    assert [process.exitcode for process in processes] == [0, 0], f"not done in {DEADLINE_S} s"
    return alone, [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_of_a_step_are_those_of_one_rank(seen, dtype):
    alone, ranks = seen
    for rank in ranks:
        assert rank[dtype]["metrics"] == pytest.approx(alone[dtype]["metrics"], rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_adapters_after_two_steps_are_those_of_one_rank(seen, dtype):
    alone, ranks = seen
    for rank in ranks:
        assert distance(rank[dtype]["sent"], alone[dtype]["sent"]) < (1e-6 if dtype == "float32" else 1e-4)
        assert torch.equal(rank[dtype]["scores"], ranks[0][dtype]["scores"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_rank_0_gathers_to_send_are_the_adapters_alone(seen, dtype):
    found = seen[1][0][dtype]
    assert list(found["slot"]) == list(found["sent"])
    for name, data in found["slot"].items():
        assert data == found["sent"][name].contiguous().view(torch.uint8).numpy().tobytes(), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_base_is_sharded_in_its_dtype_beside_float32_adapters(seen, dtype):
    for rank in seen[1]:
        found = rank[dtype]
        assert (found["masters"], found["base"]) == ({torch.float32}, {getattr(torch, dtype)})
        assert found["sharded"] == {True}


def test_under_the_weights_of_the_rehearsal_ranks_score_as_one_and_keep_their_own(seen):
    """``sent`` was read after it."""
    alone, ranks = seen
    for rank in ranks:
        found, expected = rank["float32"]["rehearsed"], alone["float32"]["rehearsed"]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
