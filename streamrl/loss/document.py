"""``python -m streamrl.loss.document``: writes ``docs/losses.md`` from the code, and with ``--figures`` its figures.

Figures need matplotlib (``pip install 'streamrl[docs]'``); everything else is text.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import math
import re
import textwrap
from pathlib import Path
from typing import Any

import torch

from streamrl.loss.advantages import advantages
from streamrl.loss.batch import LossBatch
from streamrl.loss.kl import kl_terms
from streamrl.loss.policy import evaluate, loss_params
from streamrl.loss.reduce import token_weights
from streamrl.objective_params import Corrections
from streamrl.objectives import OBJECTIVES, Objective, Ratio

NEEDS = {
    Ratio.NONE: "current",
    Ratio.UPDATE: "current, behaviour (or proximal)",
    Ratio.WHOLE: "current, behaviour",
    Ratio.DECOUPLED: "current, proximal, behaviour",
}
PROBABILITY = 0.2
"""Of the token under the behaviour policy, in the figures."""
POINTS = 161
FIGURE_SETTINGS: dict[str, dict[str, Any]] = {
    "clip_cov": {"cov_low": 1e9, "cov_high": 2e9},
    "kl_cov": {"cov_share": 1.0},
}
"""Clip-Cov on tokens that are not drawn, KL-Cov on tokens that are held."""

INTRODUCTION = """# Losses

Made from the code by `python -m streamrl.loss.document`; edit the code, not this page.

`streamrl launch loss=NAME` takes the preset of that name in `conf/loss/`: the loss with the advantage and the
aggregation of its paper. In Python:

```python
from streamrl.loss import LossBatch, loss_params, policy_loss

batch = LossBatch(current, behaviour, advantages, mask, segments, proximal=proximal)  # flat [T] tensors
loss, measures = policy_loss("gspo", batch, loss_params("gspo", clip_low=1e-3))
```

μ is the behaviour policy (the sampler), π_old the proximal one (the trainer before its update), π the current one;
r = π/π_old, w = π_old/μ, ρ = π/μ, ℓ the log of a ratio, A the advantage, sg a stop-gradient. Losses are per token and
minimised. On policy each has the gradient of REINFORCE, −A·∇log π.

With `loss.proximal=behaviour` μ takes the place of π_old in r, and a clip bounds the whole way from the sampler. With
`loss.proximal=recompute` one more forward pass gives π_old; a clip then acts from the second update of a batch on, so
that `loss.updates_per_batch` has to be 2 or more. |ℓ| is cut at 20 before it is exponentiated, without a gradient
beyond. A token whose log-prob is −∞ contributes nothing to a loss of the form c·A·log π.
"""
OWN = """## A loss of your own

A function of a cleaned batch and its parameters that gives the loss of each token, and a name:

```python
from streamrl.loss import register_loss

register_loss("mine", lambda batch, params: -batch.advantages * batch.current)
```

In a run it is found by module and function, `loss.name=my_package.losses:mine`, with the attribute `params` (a frozen
dataclass) for its defaults, which `loss.args` changes.
"""


ADVANTAGES = """## Advantages

`loss.advantage`, of whole trajectories. r is a reward, mean and std are those of its group.

"""
AGGREGATION = """## Aggregation

`loss.aggregation`: the weight of a token, with N sampled tokens and S trajectories in P groups of the whole batch over
all ranks, n_i tokens in its trajectory and N_g in its group. Tokens that get no loss stay in the denominators.

"""
CORRECTIONS = """## Corrections

`loss.correction`, all off, for w = π_old/μ. None of them gets a run past the parity gate, which compares log-probs
before the first loss.

"""
KL = """## KL to a reference

`loss.kl`, with x = log π_ref − log π: k1 = −x, k2 = x²/2, k3 = e^x − 1 − x. As a loss k2 and `k3_plus` have the
gradient of the divergence; as a reward (`loss.kl.place=reward`) k1 is used.

"""

SERVED = """\
`loss.kl.reference` is `initial` (the policy at the start) or a folder with a checkpoint, and `loss.kl.serve` says where
it is. `trainer`: a frozen copy in each rank's memory, sharded like the policy, and one more forward pass in every step.
`engine`: an engine in a process of its own, the actor `reference`. Rollouters have it score each group before they put
it, and the log-probs travel as the column `reference` (float32, one per token), so that the trainer holds no second
model and a step computes nothing for it. The embedded engine scores the groups that wait together, each trajectory
whole, without sharing a group's prompt; groups that are dropped later were scored in vain. A killed `reference` is
replaced; rollouters wait for it with their groups. With `initial` the parity gate compares it with the trainer before
the first step.

```
streamrl launch --config quickstart loss.kl.coefficient=0.01 loss.kl.reference=initial loss.kl.serve=engine
```
"""
INVARIANCE = """## What does not depend on packing

Order of the groups, micro-batches, rows and their padding, and the number of ranks change neither loss nor gradient:
the weights of tokens already hold the denominators of the whole batch. In float32 the tests hold 1, 2 and 4 ranks, and
every split, to 1e-6: metrics relative to their value, gradients to their norm. Sums over tokens (loss, ratios of
sequences, diagnostics, squares of the gradient) are taken in float64, and ranks are added in float32. What is left is
the rounding of the attention and matrix kernels, whose order of summation follows the width of a row: 2e-7 to 1e-6 of
the gradient's norm for models of 2 to 6 layers when everything is packed otherwise, 1e-7 between numbers of ranks with
the same micro-batches (2026-11-21, CPU, torch 2.13).

"""
LEARNING = """## What they learn

The quickstart with each loss at three bounds, 800 steps instead of its 1,500, medians of three seeds: held-out
accuracy (greedy, 256 tasks) of the first and the last version, steps until an evaluation first reached 80 % (800
where none did), and means over the second half of the steps. 2026-11-21, 2 shared CPU cores, `streamrl bench losses
--steps 800` (`bench/results/losses-2026-11-21.json`). Every loss has the quickstart's learning rate and the defaults
of this page; nothing was tuned, so the table says that each of them learns, not which is best.

| loss | max_lag | accuracy, from → to (range over seeds) | steps to 80 % | mean lag | ESS | clipped |
|---|---|---|---|---|---|---|
| tis | 0 | 37.1% → 84.8% (73.0% to 87.1%) | 652 | 0.00 | 1.000 | 0.00% |
| tis | 2 | 37.1% → 82.0% (75.4% to 84.4%) | 653 | 1.89 | 0.986 | 0.00% |
| tis | 8 | 37.1% → 79.3% (71.5% to 79.7%) | 753 | 7.84 | 0.900 | 0.11% |
| grpo | 0 | 37.1% → 85.2% (76.2% to 85.5%) | 651 | 0.00 | 1.000 | 0.00% |
| grpo | 2 | 37.1% → 88.7% (87.9% to 91.0%) | 454 | 1.92 | 0.992 | 1.84% |
| grpo | 8 | 37.1% → 68.4% (61.3% to 80.9%) | 800 | 7.78 | 0.955 | 6.80% |
| gspo | 0 | 37.1% → 86.3% (75.4% to 87.5%) | 601 | 0.00 | 1.000 | 0.00% |
| gspo | 2 | 37.1% → 83.2% (82.4% to 85.5%) | 602 | 1.92 | 0.998 | 47.89% |
| gspo | 8 | 37.1% → 73.4% (69.5% to 77.3%) | 800 | 7.87 | 0.955 | 53.77% |
| cispo | 0 | 37.1% → 84.4% (77.0% to 85.2%) | 651 | 0.00 | 1.000 | 0.00% |
| cispo | 2 | 37.1% → 82.8% (81.2% to 84.4%) | 703 | 1.88 | 0.983 | 0.01% |
| cispo | 8 | 37.1% → 74.6% (64.8% to 82.0%) | 800 | 7.70 | 0.853 | 0.21% |
| sapo | 0 | 37.1% → 84.8% (74.2% to 86.7%) | 701 | 0.00 | 1.000 | 0.00% |
| sapo | 2 | 37.1% → 86.3% (79.7% to 87.1%) | 653 | 1.90 | 0.982 | 0.00% |
| sapo | 8 | 37.1% → 67.2% (64.8% to 77.7%) | 800 | 6.98 | 0.845 | 0.00% |
| decoupled_ppo | 0 | 37.1% → 90.6% (74.6% to 91.0%) | 751 | 0.00 | 0.998 | 0.69% |
| decoupled_ppo | 2 | 37.1% → 71.9% (60.2% to 78.5%) | 800 | 1.97 | 0.927 | 1.14% |
| decoupled_ppo | 8 | 37.1% → 68.8% (68.4% to 71.1%) | 800 | 7.98 | 0.852 | 0.56% |
| dppo | 0 | 37.1% → 87.9% (74.2% to 87.9%) | 601 | 0.00 | 1.000 | 0.00% |
| dppo | 2 | 37.1% → 84.8% (83.6% to 86.3%) | 502 | 1.98 | 0.988 | 0.21% |
| dppo | 8 | 37.1% → 82.4% (76.6% to 82.8%) | 702 | 7.97 | 0.932 | 1.53% |

Nearly all of the bound is used, because these rollouters outrun the trainer. From `max_lag=2` to 8 the accuracy after
as many steps falls for every loss: by 2 to 3 points for dppo, tis and decoupled_ppo, by about 20 for grpo and sapo;
with three seeds and ranges of 10 points there is no more to read into it. gspo clips half of its tokens off policy:
its bounds (`clip_low` 3e-4, `clip_high` 4e-4) are the paper's, for ratios of whole sequences.

"""
STEERING = """## Staleness that steers itself

`staleness.target_ess` lowers how far ahead rollouters may run, inside `max_lag`, until the effective sample size of the
importance weights (`policy/ess`, raw, all ranks) keeps the target: while it does, the headroom grows by a quarter of a
batch per step, else it is halved and given time to show (`streamrl/steering.py`). `lag/headroom` says what is allowed
now, in groups.

The quickstart with a bound that is too wide for its learning rate (`max_lag=8 trainer.lr=1e-4
trainer.schedule=constant`, 800 steps), means over the second half of the steps; ± is the deviation from step to step.
2026-11-21, 2 shared CPU cores, `streamrl bench steering --runs 2`; medians of its rows are in
`bench/results/steering-2026-11-21.json`. Accuracy is that of the last version, on held-out tasks, greedy; it begins at
about 37 %.

| `staleness.target_ess` | seed | ESS | mean lag, versions | headroom, batches | accuracy |
|---|---|---|---|---|---|
| 0 (off) | 0 | 0.735 ± 0.221 | 5.1 | – | 19.9 % |
| 0 (off) | 1 | 0.681 ± 0.220 | 7.0 | – | 14.8 % |
| 0.9 | 0 | 0.904 ± 0.095 | 2.0 | 2.1 | 75.4 % |
| 0.9 | 1 | 0.896 ± 0.127 | 2.0 | 1.9 | 49.6 % |

Without it the lag is whatever the two halves' speeds make of the bound, and these runs unlearned what they could; with
it the mean keeps the target while single steps go below it.
"""


def page() -> str:
    """The whole of ``docs/losses.md``."""
    parts = [
        INTRODUCTION,
        _overview(),
        *(_section(each) for each in OBJECTIVES.values()),
        OWN,
        ADVANTAGES + _rules(advantages),
        AGGREGATION + _rules(token_weights),
        CORRECTIONS + _parameters(Corrections()),
        KL + _paragraph(kl_terms),
        SERVED,
        INVARIANCE,
        LEARNING,
        STEERING,
    ]
    return "\n".join(part.rstrip() + "\n" for part in parts)


def curves(name: str, sign: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ratio π/μ from 1/8 to 8, weight of the policy gradient, and ∂loss/∂log π there, for A = ``sign``; ``[P]``.

    Each token is a sequence of its own, and π_old = μ, so that all ratios of a loss are this one.
    """
    logs = torch.linspace(-math.log(8), math.log(8), POINTS, dtype=torch.float64)
    if name == "dppo":
        logs = logs.clamp(max=math.log(0.999 / PROBABILITY))  # a probability is at most 1
    behaviour = torch.full_like(logs, math.log(PROBABILITY))
    current = (behaviour + logs).requires_grad_()
    batch = LossBatch(
        current,
        behaviour,
        torch.full_like(logs, float(sign)),
        torch.ones(POINTS, dtype=torch.bool),
        torch.arange(POINTS),
        proximal=behaviour,
        weights=torch.ones_like(logs),
    )
    result = evaluate(name, batch, loss_params(name, **FIGURE_SETTINGS.get(name, {})))
    result.loss.backward()
    assert current.grad is not None
    return torch.exp(logs), result.tokens.slope, current.grad


def draw(folder: Path) -> None:
    """One SVG per loss: weight and gradient against the ratio, for both signs of the advantage."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "streamrl", "svg.fonttype": "none", "font.size": 8})
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    for name in OBJECTIVES:
        figure, axes = pyplot.subplots(1, 2, figsize=(6.4, 2.2), layout="constrained")
        for sign, style in ((1, "-"), (-1, "--")):
            ratio, weight, gradient = curves(name, sign)
            for axis, values, label in ((axes[0], weight, "weight"), (axes[1], gradient, "∂loss/∂log π")):
                axis.plot(ratio, values, style, linewidth=1.2, label=f"A = {sign:+d}")
                axis.set(xscale="log", xlabel="ratio", title=f"{name}: {label}")
                axis.set_xticks([0.125, 0.25, 0.5, 1, 2, 4, 8], ["⅛", "¼", "½", "1", "2", "4", "8"])
                axis.minorticks_off()
                axis.axvline(1.0, color="0.85", linewidth=0.8, zorder=0)
                axis.legend(frameon=False)
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
        pyplot.close(figure)


def attribute_docs(kind: type) -> dict[str, str]:
    """The docstrings under the attributes of a class and its bases, each on one line."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(node, ast.ClassDef)
        for field, text in zip(node.body, node.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                assert isinstance(field.target, ast.Name)
                found[field.target.id] = " ".join(str(text.value.value).split())
    return found


def _overview() -> str:
    lines = ["| name | formula | log-probs | paper | when to use |", "|---|---|---|---|---|"]
    for each in OBJECTIVES.values():
        cells = (f"[{each.name}](#{each.name})", each.formula, NEEDS[each.ratio], _linked(each.paper), each.when)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _section(each: Objective) -> str:
    constant = ", up to a constant" if each.name == "dr_grpo" else ""
    parts = [
        f"## {each.name}\n",
        f"{each.formula}. Paper: {_linked(each.paper)}.",
        f"Its advantage is `{each.advantage}`, its aggregation `{each.aggregation}`{constant}.\n",
    ]
    if each.batch_wide:
        parts.append("A statistic of the whole batch enters, taken in a forward pass before the first update.\n")
    parts.append(_parameters(each.params) or "No parameters.\n")
    parts.append(f"![{each.name}](figures/losses/{each.name}.svg)\n")
    return "\n".join(parts)


def _parameters(params: Any) -> str:
    docs = attribute_docs(type(params))
    lines = ["| parameter | default | meaning |", "|---|---|---|"]
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        meaning = docs[field.name].replace("``", "`").replace("|", "\\|")
        lines.append(f"| `{field.name}` | {shown} | {meaning} |")
    return "\n".join(lines) + "\n" if len(lines) > 2 else ""


def _linked(paper: str) -> str:
    return re.sub(r"(\d{4}\.\d{5})", r"[\1](https://arxiv.org/abs/\1)", paper)


def _rules(function: Any) -> str:
    """The list in the docstring of a function, and what follows it but the errors."""
    text = inspect.cleandoc(function.__doc__).replace("``", "`")
    return text[text.index("- `") :].split(" Raises `ValueError`")[0] + "\n"


def _paragraph(function: Any) -> str:
    text = inspect.cleandoc(function.__doc__).replace("``", "`").split("\n\n")[1]
    return text.split("\nRaises `ValueError`")[0] + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Write docs/losses.md from the code.")
    parser.add_argument("--figures", action="store_true", help="also draw the figures (needs matplotlib)")
    arguments = parser.parse_args()
    docs = Path(__file__).resolve().parents[2] / "docs"
    (docs / "losses.md").write_text(page(), encoding="utf-8")
    if arguments.figures:
        draw(docs / "figures" / "losses")


if __name__ == "__main__":
    main()
