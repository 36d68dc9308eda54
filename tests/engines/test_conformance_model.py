"""The reference that engines are judged by: it sees each tensor, the weights of each span, and every parameter."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from conformance_model import ConformanceModel, build_model, distribution

from streamrl.types import SamplingParams

ROW = list(range(8, 60))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ConformanceModel:
    return build_model(Path(tmp_path_factory.mktemp("model")), tied=False)


def test_a_single_tensor_of_other_weights_moves_the_scores_by_far_more_than_the_tolerance(
    model: ConformanceModel,
) -> None:
    body, own = model.bodies["A"], model.weights["A"]
    scores = model.score("A", ROW)
    for name, tensor in model.weights["B"].items():
        body.load_state_dict({name: tensor}, strict=False)
        moved = np.abs(model.score("A", ROW) - scores).max()
        body.load_state_dict({name: own[name]}, strict=False)
        assert moved > 0.1, name
    assert model.score("A", ROW).tolist() == scores.tolist()


def test_late_weights_leave_keys_and_values_alone_and_others_do_not(model: ConformanceModel) -> None:
    prompt, said = ROW[:20], ROW[20:40]
    for other, same in (("late", True), ("B", False)):
        stale = model.logits_over_stale_cache(prompt, said, [("A", 8), (other, 12)])
        fresh = {which: model.logits(which, [*prompt, *said])[19:-1] for which in ("A", other)}
        np.testing.assert_allclose(stale[:8], fresh["A"][:8], atol=1e-4)
        assert (np.abs(stale[8:] - fresh[other][8:]).max() < 1e-4) == same
        assert np.abs(fresh["A"] - fresh[other]).max() > 1


def test_a_distribution_worked_out_by_hand() -> None:
    """Prompt 0, sampled 1 1. Penalties leave the probabilities 0.4, 0.1, 0.3, 0.2 at temperature 1."""
    wanted = np.log([0.4, 0.1, 0.3, 0.2])
    logits = wanted + [0, 2 * 0.5 + 0.25, 0, 0]
    logits[:2] /= 2  # below 0, where the repetition penalty multiplies
    penalties = {"repetition_penalty": 2.0, "presence_penalty": 0.25, "frequency_penalty": 0.5}
    kept, _ = distribution(logits, [0], [1, 1], SamplingParams(**penalties))
    np.testing.assert_allclose(np.exp(kept), [0.4, 0.1, 0.3, 0.2])
    cases = [
        ({"min_p": 0.3}, [4 / 9, 0, 3 / 9, 2 / 9], math.log(0.12 / 0.1)),
        ({"top_k": 2}, [4 / 7, 0, 3 / 7, 0], math.log(3 / 2)),
        ({"top_p": 0.69}, [4 / 7, 0, 3 / 7, 0], 4 * 0.01),
        ({"top_k": 2, "top_p": 0.5}, [1, 0, 0, 0], 4 * (4 / 7 - 0.5)),
        ({"temperature": 0.5, "top_k": 2}, [16 / 25, 0, 9 / 25, 0], 2 * math.log(3 / 2)),
        ({"temperature": 0.0, "top_k": 1, "min_p": 0.9}, [0.4, 0.1, 0.3, 0.2], math.inf),
    ]
    for changes, expected, distance in cases:
        logprobs, found = distribution(logits, [0], [1, 1], SamplingParams(**penalties, **changes))
        np.testing.assert_allclose(np.exp(logprobs), expected, atol=1e-12, err_msg=str(changes))
        assert found == pytest.approx(distance), changes
