"""One, two and four ranks: real processes over gloo, uneven micro-batches, equal numbers to 1e-6 in float32.

Metrics are compared relative to their value, gradients relative to their norm: of each tensor, and of all together. One
rank is asked twice, with the micro-batches of the others and with everything in one.

The four processes are started once. They run the same steps as one mesh of four, then as two independent meshes of two,
and leave what they saw in files; the tests below compare those with a learner without ranks in this process.
"""

import math
import multiprocessing
import time
import traceback
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from learner_cases import batch, distance, group, settings, tiny_model, trajectory, varied_groups
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from streamrl.config import load_config
from streamrl.errors import DivergedError
from streamrl.policy.learner import Learner
from streamrl.policy.parallel import close_ranks, full_parameters, init_ranks
from streamrl.types import TrainGroup

DEADLINE_S = 240.0
SAME = 1e-6
CLIP = 0.05
SCORED = trajectory("abcdef", "ghij").tokens
OBJECTIVES = {
    "m2po": ["loss.clip_low=0.01", "loss.clip_high=0.01"],
    "tis": ["loss.correction.opsm=0.1", "loss.correction.renormalise=true"],
    "kl_cov": ["loss.cov_share=0.2", "loss.pull=1.0"],
    "gspo": ["loss.kl.coefficient=0.1", "loss.kl.reference=initial", "loss.correction.opsm=0.1"],
    "decoupled_ppo": ["loss.weight_cap=1.2"],
    "sapo": ["loss.advantage=gae", "loss.kl.coefficient=0.1", "loss.kl.reference=initial", "loss.kl.place=reward"],
}
"""A batch-wide statistic, a reference policy, a pass before the update with several updates, a value head."""
LOW = ("tis", "sapo")
"""Those that also run in bfloat16."""
CASES = [(2, False), (4, True)]
"""(ranks, tied embedding and head)"""


def shares(ranks: int) -> list[list[list[TrainGroup]]]:
    """Micro-batches per rank: the same six groups, uneven, with empty ones first, between and last; 0: one of all."""
    a, b, c, d, e, f = groups = varied_groups()
    for lease, each in enumerate(groups):
        each.lease = lease
    c1 = TrainGroup(c.lease, c.env, c.trajectories[:1], c.advantages[:1], c.token_weights[:1])
    c2 = TrainGroup(c.lease, c.env, c.trajectories[1:], c.advantages[1:], c.token_weights[1:])
    four = [[[a, b], [], [c1]], [[], [c2], []], [[d], [e], []], [[], [], [f]]]
    return {
        0: [[[a, b, c, d, e, f]]],
        1: [[m for each in four for m in each]],
        2: [four[0] + four[1], four[2] + four[3]],
        4: four,
    }[ranks]


def observe(mesh, ranks: int, rank: int, tied: bool) -> dict:
    """Everything that the tests compare, as one rank sees it."""
    model = tiny_model(tied)
    learner = Learner(settings(eps=0.1, max_grad_norm=CLIP), model, mesh)
    gradients: dict[str, torch.Tensor] = {}

    def keep(*_):
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            gradients[name] = (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).clone()

    handle = register_optimizer_step_pre_hook(keep)
    seen: dict = {"scores_before": learner.score(SCORED, 0.7)}
    seen["first"] = learner.step(batch(*shares(ranks)[rank]))
    seen["gradients"] = dict(gradients)
    handle.remove()
    seen["scores"] = learner.score(SCORED, 0.7)
    seen["sharded"] = {isinstance(parameter, DTensor) for parameter in model.parameters()}
    seen["second"] = learner.step(batch(*shares(ranks)[rank], version=6))
    seen["nothing"] = learner.step(batch([], [group(trajectory("ab", "cd", versions=[(1, 2)]))] if rank == 0 else []))
    seen["diverged"] = diverge(learner, rank, last=max(ranks, 1) - 1)
    seen["after"] = learner.step(batch(*shares(ranks)[rank], version=7))
    names = OBJECTIVES if ranks else ()
    seen["objectives"] = {name: objective(name, mesh, shares(ranks)[rank], tied) for name in names}
    low = [objective(name, mesh, shares(ranks)[rank], tied, "bfloat16") for name in LOW if ranks]
    seen["low"] = dict(zip(LOW, low, strict=False))
    seen["parameters"] = {name: tensor.clone() for name, tensor in learner.full_parameters()}
    seen["dtypes"] = {parameter.dtype for parameter in model.parameters()}
    return seen


def objective(name: str, mesh, micro_batches: list[list[TrainGroup]], tied: bool, dtype: str = "float32") -> dict:
    """Metrics and parameters after a step of a loss that needs more than one forward pass."""
    config = settings(eps=0.1)
    config.model.dtype = dtype
    config.loss = load_config(None, [f"loss={name}", *OBJECTIVES[name]]).loss
    learner = Learner(config, tiny_model(tied), mesh)
    metrics = learner.step(batch(*micro_batches))
    masters = {name: tensor.clone() for name, tensor in full_parameters(learner.model.named_parameters())}
    sent = {tensor.dtype for _, tensor in learner.full_parameters()}
    return {"metrics": metrics, "parameters": masters, "sent": sent}


def diverge(learner: Learner, rank: int, last: int) -> str:
    """What the ranks say when only the last one has a loss that is not finite."""
    mine = trajectory("ab", "cd")
    if rank == last:
        mine.behaviour[3] = math.nan
    try:
        learner.step(batch([group(mine, advantages=[1.0])], step=9))
    except DivergedError as error:
        return str(error)
    return "no error"


def work(rank: int, folder: Path) -> None:
    """Body of one of the four processes."""
    try:
        torch.set_num_threads(1)
        four = init_ranks(rank, 4, folder / "store", timeout_s=DEADLINE_S / 2)
        two = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "shard"))["shard"]
        seen = {(4, True): observe(four, 4, rank, tied=True), (2, False): observe(two, 2, rank % 2, tied=False)}
        torch.save(seen, folder / f"rank-{rank}.pt")
        close_ranks()
    except BaseException:
        (folder / f"rank-{rank}.error").write_text(traceback.format_exc())
        raise


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """``{(ranks, tied): [what each rank saw]}``, with one rank under ``(1, tied)``, in one micro-batch under 0."""
    folder = tmp_path_factory.mktemp("ranks")
    # torch and transformers take seconds to import: once in a clean server, from which the four are forked.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["streamrl.policy.learner", "transformers.models.qwen3.modeling_qwen3"])
    processes = [context.Process(target=work, args=(rank, folder), daemon=True) for rank in range(4)]
    deadline = time.monotonic() + DEADLINE_S
    try:
        for process in processes:
            process.start()
        alone = {(split, tied): [observe(None, split, 0, tied)] for split in (0, 1) for tied in (True, False)}
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
    finally:
        for process in processes:
            process.kill()
            process.join()
        forkserver._forkserver._stop()  # or it lives until pytest ends
    errors = [path.read_text() for path in sorted(folder.glob("*.error"))]
    assert not errors, "\n".join(errors)
    assert [process.exitcode for process in processes] == [0] * 4, f"not done in {DEADLINE_S} s"
    each = [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(4)]
    return alone | {case: [rank[case] for rank in each] for case in CASES}


def numbers(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("time/")}


@pytest.mark.parametrize("split", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_metrics_are_those_of_one_rank(seen, case, split):
    alone = seen[split, case[1]][0]
    for rank in seen[case]:
        for step in ("first", "second", "nothing", "after"):
            assert numbers(rank[step]) == pytest.approx(numbers(alone[step]), rel=SAME, abs=1e-7), step


@pytest.mark.parametrize("split", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_rank_and_clipped_by_the_global_norm(seen, case, split):
    alone = seen[split, case[1]][0]
    assert alone["first"]["policy/grad_norm"] > 2 * CLIP
    for rank in seen[case]:
        total = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in rank["gradients"].values()))
        assert total == pytest.approx(CLIP, rel=SAME)
        assert distance(rank["gradients"], alone["gradients"]) < SAME
        for name, gradient in alone["gradients"].items():
            assert distance({name: rank["gradients"][name]}, {name: gradient}) < SAME, name


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_objective_is_that_of_one_rank(seen, case, name):
    alone = seen[1, case[1]][0]["objectives"][name]
    for rank in seen[case]:
        found = rank["objectives"][name]
        assert numbers(found["metrics"]) == pytest.approx(numbers(alone["metrics"]), rel=SAME, abs=1e-7)
        assert distance(found["parameters"], alone["parameters"]) < SAME


@pytest.mark.parametrize("name", LOW)
@pytest.mark.parametrize("case", CASES)
def test_a_bfloat16_body_is_that_of_one_rank_with_float32_masters(seen, case, name):
    """The same micro-batches: each rounds its gradient to bfloat16 once, and only sums differ."""
    alone = seen[1, case[1]][0]["low"][name]
    for rank in seen[case]:
        found = rank["low"][name]
        assert numbers(found["metrics"]) == pytest.approx(numbers(alone["metrics"]), rel=SAME, abs=1e-7)
        assert distance(found["parameters"], alone["parameters"]) < SAME
        assert {tensor.dtype for tensor in found["parameters"].values()} == {torch.float32}
        assert found["sent"] == {torch.bfloat16}


@pytest.mark.parametrize("split", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_parameters_after_all_steps_are_those_of_one_rank_under_the_same_names(seen, case, split):
    alone = seen[split, case[1]][0]
    for rank in seen[case]:
        assert list(rank["parameters"]) == list(alone["parameters"])
        assert distance(rank["parameters"], alone["parameters"]) < SAME


@pytest.mark.parametrize("case", CASES)
def test_scores_are_those_of_one_rank_before_and_after_an_update(seen, case):
    alone = seen[1, case[1]][0]
    for rank in seen[case]:
        for moment in ("scores_before", "scores"):
            torch.testing.assert_close(torch.tensor(rank[moment]), torch.tensor(alone[moment]), rtol=SAME, atol=SAME)


@pytest.mark.parametrize("case", CASES)
def test_a_loss_that_is_not_finite_on_one_rank_stops_all_of_them_and_is_named(seen, case):
    expected = f"step 9: the loss on rank {case[0] - 1} is not finite; the weights are unchanged"
    assert {rank["diverged"] for rank in seen[case]} == {expected}


@pytest.mark.parametrize("case", CASES)
def test_scoring_leaves_no_gathered_parameters_behind(seen, case):
    assert [rank["sharded"] for rank in seen[case]] == [{True}] * 4


def test_a_step_without_trainable_tokens_changes_nothing_but_the_masked_count(seen):
    for ranks, tied in CASES:
        for rank in seen[ranks, tied]:
            assert rank["nothing"]["trained_tokens"] == rank["nothing"]["policy/grad_norm"] == 0.0
            assert rank["nothing"]["lag/masked_tokens"] == 2.0


def test_parameters_stay_float32_whatever_the_number_of_ranks(seen):
    assert {dtype for observed in seen.values() for rank in observed for dtype in rank["dtypes"]} == {torch.float32}


def test_one_rank_needs_no_process_group(tmp_path):
    assert init_ranks(0, 1, tmp_path / "store") is None
    assert not dist.is_initialized()
    close_ranks()
