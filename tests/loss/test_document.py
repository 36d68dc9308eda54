"""docs/losses.md is what the code says, and the curves in its figures are those of the losses."""

import math
from pathlib import Path

import numpy as np
import pytest

from streamrl.loss.document import POINTS, attribute_docs, curves, page
from streamrl.objective_params import Corrections
from streamrl.objectives import OBJECTIVES

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_up_to_date():
    assert (DOCS / "losses.md").read_text() == page(), "run python -m streamrl.loss.document"


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_loss_has_a_section_and_a_small_figure(name):
    text = (DOCS / "losses.md").read_text()
    assert f"\n## {name}\n" in text
    figure = DOCS / "figures" / "losses" / f"{name}.svg"
    assert f"figures/losses/{name}.svg" in text
    assert figure.read_text().startswith("<?xml")
    assert figure.stat().st_size < 40_000


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_parameter_says_what_it_means(name):
    docs = attribute_docs(type(OBJECTIVES[name].params))
    assert all(docs[field] for field in OBJECTIVES[name].params.__dataclass_fields__)
    assert set(attribute_docs(Corrections)) == set(Corrections.__dataclass_fields__)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_curve_passes_through_reinforce_at_ratio_one(name, sign):
    ratio, weight, gradient = curves(name, sign)
    middle = POINTS // 2
    assert float(ratio[middle]) == pytest.approx(1.0)
    assert float(weight[middle]) == pytest.approx(1.0)
    assert float(gradient[middle]) == pytest.approx(-sign, abs=0.11)  # KL-Cov's pull has a kink there


def test_the_curves_of_ppo_are_its_clip():
    ratio, weight, gradient = (x.numpy() for x in curves("ppo", 1))
    np.testing.assert_allclose(weight, np.where(ratio > 1.2, 0.0, ratio))
    np.testing.assert_allclose(gradient, -weight)
    ratio, weight, _ = (x.numpy() for x in curves("ppo", -1))
    np.testing.assert_allclose(weight, np.where(ratio < 0.8, 0.0, ratio))
    assert math.isclose(ratio[0], 1 / 8)
