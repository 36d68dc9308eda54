"""Objectives in the settings: presets, refusals that say why, warnings, and what follows for the trainer."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path

import pytest

from streamrl import parity
from streamrl.actors import controller
from streamrl.cli import main
from streamrl.config import conf_folder, load_config, to_yaml
from streamrl.errors import ConfigError
from streamrl.objective_checks import corrections_of, loss_settings, recomputes, trains_without_advantage, warnings
from streamrl.objective_params import Corrections
from streamrl.objectives import OBJECTIVES, PARAMETERS, parameters_of
from streamrl.schema import CorrectionConfig, LossConfig

PRESETS = sorted(path.stem for path in (conf_folder() / "loss").glob("*.yaml"))


def loss(*overrides: str) -> LossConfig:
    return load_config(None, overrides).loss


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_every_loss_has_a_preset_of_a_few_lines_with_the_advantage_of_its_paper():
    assert set(OBJECTIVES) <= set(PRESETS)
    for name, objective in OBJECTIVES.items():
        text = (conf_folder() / "loss" / f"{name}.yaml").read_text()
        assert len([line for line in text.splitlines() if not line.startswith("#")]) <= 6
        assert loss(f"loss={name}").name == name
        if name != "cispo":  # its preset is ScaleRL's recipe
            assert loss(f"loss={name}").advantage == objective.advantage


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_valid_and_reads_back_equal(name: str, tmp_path: Path):
    config = load_config("quickstart", [f"loss={name}"])
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    assert load_config(str(path)) == config


def test_a_preset_sets_more_than_a_name():
    decoupled = loss("loss=decoupled_ppo")
    assert (decoupled.proximal, decoupled.updates_per_batch) == ("recompute", 2)
    assert loss("loss=grpo").aggregation == "sequence_mean_token_mean"
    assert loss("loss=icepop").correction.reject_low == 0.5


def test_a_preset_may_be_named_in_a_file_and_changed_after(tmp_path: Path):
    path = tmp_path / "mine.yaml"
    path.write_text("loss: gspo\n")
    config = load_config(str(path), ["loss.clip_low=1e-3"])
    assert (config.loss.name, config.loss.clip_low, config.loss.advantage) == ("gspo", 1e-3, "mean_std")


def test_the_settings_have_a_key_for_every_parameter_of_every_loss():
    keys = {field.name for field in dataclasses.fields(LossConfig)}
    assert set(PARAMETERS) <= keys
    assert loss_settings(LossConfig()) == {}
    assert loss_settings(LossConfig(cap=2.0)) == {"cap": 2.0}


def test_the_settings_have_a_key_for_every_correction_and_all_are_off():
    names = [field.name for field in dataclasses.fields(Corrections)]
    assert [field.name for field in dataclasses.fields(CorrectionConfig)] == names
    assert corrections_of(LossConfig()) == Corrections()


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["loss.name=decoupled_ppo"], "needs the trainer's log-probs from before the update"),
        (["loss=decoupled_ppo", "loss.proximal=behaviour"], "set loss.proximal=recompute"),
        (["loss=decoupled_ppo", "loss.updates_per_batch=1"], "the clip could never act"),
        (["loss=ppo", "loss.proximal=recompute"], "both are the same policy, so that the clip could never act"),
        (["loss=gspo", "loss.proximal=recompute"], "loss.updates_per_batch=2 or more"),
        (["loss.kl.coefficient=0.01"], "a KL term without a reference policy: set loss.kl.reference=initial"),
        (["loss.kl.coefficient=0.1", "loss.kl.reference=/no/such/folder"], "there is no config.json in it"),
        (["loss.kl.reference=initial"], "holds a second model that loss.kl.coefficient=0 never uses"),
        (["loss.kl.serve=engine"], "has no reference policy to serve: set loss.kl.reference=initial or a folder"),
        (["loss.kl.serve=vllm"], "loss.kl.serve=vllm: expected one of trainer, engine"),
        (["loss.kl.coefficient=-1"], "must be at least 0"),
        (["loss.value.lam=1.5"], "loss.value.lam=1.5: must lie in [0, 1]"),
        (["loss.advantage=gae", "loss.turn_discount=0.9"], "would discount twice"),
        (["loss.kl.form=k4"], "loss.kl.form=k4: expected one of k1, k2, k3, k3_plus, absolute"),
        (["loss=gpso"], "did you mean 'gspo'?"),
        (["loss=gspo", "loss.tau_pos=2"], "loss.tau_pos is not a parameter of gspo, which takes loss.clip_low"),
        (["loss.cap=-1"], "loss.cap=-1.0: must be positive"),
        (["loss=ppo", "loss.dual_clip=0.5"], "loss.dual_clip=0.5: must be above 1; .inf switches it off"),
        (["loss.args.x=1"], "loss.args is for a loss of your own; tis takes loss.cap"),
        (["loss.name=my_pkg.mine:loss", "loss.cap=2"], "give my_pkg.mine:loss its own as loss.args.cap"),
        (["loss.advantage=median"], "loss.advantage=median: expected one of mean, mean_std"),
        (["loss.aggregation=sum"], "expected one of token_mean"),
        (["loss.updates_per_batch=0"], "must be at least 1"),
        (["loss.turn_discount=1.5"], "must lie in [0, 1)"),
        (["loss.overlong_cache=65"], "between 0 and sampling.max_tokens=64"),
        (["loss.correction.weight=token"], "tis would count proximal/behaviour twice"),
        (["loss=ppo", "loss.correction.weight=token"], "would count current/behaviour twice"),
        (["loss.correction.weight_cap=2"], "acts with loss.correction.weight="),
        (["loss.correction.reject_low=0.5"], "act with loss.correction.reject="),
        (["loss.correction.reject=token"], "drops nothing: set reject_low or reject_high"),
        (
            ["loss.correction.reject=token", "loss.correction.reject_low=3", "loss.correction.reject_high=2"],
            "low < high",
        ),
        (["loss.correction.opsm=0"], "must be positive; .inf switches it off"),
        (["loss.correction.reject=batch"], "expected one of none, token, sequence, geometric"),
        (["staleness.target_ess=1"], "must lie in [0, 1)"),
        (["staleness.target_ess=0.9", "max_lag=0"], "max_lag=0 leaves no room"),
        (["loss.cap=many"], "loss.cap expects float or null, got 'many'"),
    ],
)
def test_what_cannot_do_what_it_says_is_refused_with_the_reason(overrides: list[str], reason: str):
    assert reason in refused(*overrides)


def test_gspo_with_the_epsilon_of_ppo_is_warned_of():
    assert warnings(load_config(None, ["loss=gspo"])) == []
    (line,) = warnings(load_config(None, ["loss=gspo", "loss.clip_low=0.2", "loss.clip_high=0.2"]))
    assert "geometric mean" in line
    assert "loss.clip_low=3e-4" in line


def test_a_loss_without_a_ratio_on_stale_data_is_warned_of():
    assert warnings(load_config(None, ["loss=rloo", "max_lag=0"])) == []
    (line,) = warnings(load_config(None, ["loss=rloo", "max_lag=4"]))
    assert "does not correct for stale data and max_lag=4" in line
    corrected = ["loss=rloo", "max_lag=4", "loss.correction.weight=token", "loss.correction.weight_cap=2"]
    assert warnings(load_config(None, corrected)) == []


def test_a_dry_run_prints_the_warnings(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        main(["launch", "--dry-run", "loss=gspo", "loss.clip_high=0.2"])
    assert caught.value.code == 0
    printed = capsys.readouterr()
    assert "streamrl: warning: loss.name=gspo with a clip of 0.2" in printed.err
    assert "name: gspo" in printed.out


def test_a_refusal_ends_the_command_with_exit_code_two(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        main(["launch", "--dry-run", "loss.kl.coefficient=0.1"])
    assert caught.value.code == 2
    assert "without a reference policy" in capsys.readouterr().err


def test_a_pass_before_the_update_is_made_only_where_something_needs_it():
    assert [name for name in OBJECTIVES if recomputes(loss(f"loss={name}"))] == [
        "decoupled_ppo",
        "m2po",
        "clip_cov",
        "kl_cov",
    ]
    assert recomputes(loss("loss=gspo", "loss.updates_per_batch=4"))


def test_a_pull_or_a_kl_term_needs_the_trajectories_without_advantage():
    assert [name for name in OBJECTIVES if trains_without_advantage(loss(f"loss={name}"))] == [
        "dppo",
        "clip_cov",
        "kl_cov",
    ]
    assert not trains_without_advantage(loss("loss=dppo", "loss.pull=0"))
    assert trains_without_advantage(loss("loss.name=my_pkg.mine:loss"))
    assert trains_without_advantage(loss("loss.kl.coefficient=0.1", "loss.kl.reference=initial"))


def test_no_correction_gets_a_run_past_the_parity_gate():
    """The gate reads no setting of the loss: it compares log-probs before the first loss exists."""
    files = [Path(inspect.getfile(controller)), *Path(parity.__path__[0]).glob("*.py")]
    assert len(files) > 5
    for file in files:
        assert "config.loss" not in file.read_text()
        assert "correction" not in file.read_text()


def test_parameters_are_listed_by_loss():
    assert parameters_of("gspo") == ("clip_low", "clip_high")
    assert parameters_of("reinforce") == ()
