"""Every way to get a setting wrong ends in one line that says which key, what came, and the way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.config import all_keys, conf_folder, load_config, parse_override, to_yaml
from streamrl.errors import ConfigError
from streamrl.schema import Config


def refused(*overrides: str, source: str | None = None, **flags: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides, flags)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_base_states_every_key_with_its_default():
    assert load_config("base") == Config()
    text = (conf_folder() / "base.yaml").read_text()
    leaves = {key.rpartition(".")[2] for key in all_keys()}
    assert not [leaf for leaf in leaves if f"{leaf}:" not in text]


def test_no_config_means_base():
    assert load_config() == load_config("base")


@pytest.mark.parametrize("path", sorted(conf_folder().glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_config_is_valid(path: Path):
    load_config(path.stem)


def test_overrides_are_typed_yaml_with_dotted_keys():
    config = load_config(None, ["trainer.lr=1e-4", "max_lag=3", "env.args.operators=[+, -]", "group.size=4"])
    assert (config.trainer.lr, config.max_lag, config.group.size) == (1e-4, 3, 4)
    assert config.env.args["operators"] == ["+", "-"]


def test_a_template_that_is_no_yaml_stays_text():
    assert parse_override("env.args.template={expression}=") == ("env.args.template", "{expression}=")


def test_a_plain_value_for_a_section_sets_its_name():
    config = load_config(None, ["env=my_pkg.tasks:Riddles", "loss=ppo", "wandb=disabled", "parity=warn"])
    assert (config.env.name, config.loss.name, config.wandb.name) == ("my_pkg.tasks:Riddles", "ppo", "disabled")
    assert config.parity.name == "warn"


def test_flags_win_over_overrides():
    assert load_config(None, ["steps=7"], {"steps": 5}).steps == 5


def test_a_dumped_config_loads_back_equal(tmp_path: Path):
    config = load_config("quickstart", ["seed=3"])
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    assert load_config(str(path)) == config


def test_an_unknown_key_names_its_path_and_the_nearest_key():
    message = refused("trainer.learning_rat=1")
    assert "unknown key 'trainer.learning_rat'" in message
    assert "'max_lag'" in refused("max_lags=1")
    assert "'trainer.lr'" in refused("lr=1e-3")


def test_an_unknown_key_in_a_file_names_the_file(tmp_path: Path):
    path = tmp_path / "mine.yaml"
    path.write_text("grup:\n  size: 4\n")
    message = refused(source=str(path))
    assert str(path) in message
    assert "'grup'" in message
    assert "'group'" in message


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("steps=many", "steps expects int, got 'many'"),
        ("steps=1.5", "steps expects int, got 1.5"),
        ("steps=true", "steps expects int, got True"),
        ("trainer.lr=fast", "trainer.lr expects float, got 'fast'"),
        ("group.drop_zero_variance=3", "group.drop_zero_variance expects bool, got 3"),
        ("env.args=3", "env.args expects a mapping, got 3"),
        ("trainer=3", "trainer is a section, got 3"),
    ],
)
def test_an_ill_typed_value_says_what_was_expected(override: str, expected: str):
    assert expected in refused(override)


@pytest.mark.parametrize("text", ["steps", "=5", "steps 5"])
def test_an_override_without_key_or_value_is_refused(text: str):
    assert "expected key=value" in refused(text)


def test_a_missing_config_names_the_shipped_ones():
    message = refused(source="quikstart")
    assert "no such file" in message
    assert "did you mean 'quickstart'?" in message


def test_a_file_that_is_no_yaml_is_named(tmp_path: Path):
    path = tmp_path / "broken.yaml"
    path.write_text("a: [1,\n")
    assert str(path) in refused(source=str(path))


@pytest.mark.parametrize(
    ("override", "way_out"),
    [
        ("trainers=0", "trainers=0: must be at least 1"),
        ("rollouts=-1", "rollouts=-1: must be at least 1"),
        ("max_lag=-1", "max_lag=-1: must be at least 0"),
        ("group.size=1", "group.size=1: must be at least 2"),
        ("parity=loose", "parity.name=loose: expected one of gate, warn"),
        ("parity.rms=-1", "parity.rms=-1.0: must be at least 0"),
        ("on_stale=drop", "on_stale=drop: expected one of mask, evict, wait"),
        ("loss=tsi", "loss.name=tsi: expected one of tis, ppo"),
        ("sampling.temperature=0", "sampling.temperature=0.0: must be positive"),
        ("sampling.temperature=.nan", "must be positive"),
        ("trainer.lr=.nan", "trainer.lr=nan: must be at least 0"),
        ("trainer.lr=.inf", "and finite"),
        ("sampling.top_p=0", "sampling.top_p=1.0 and sampling.min_p=0.0 switch them off"),
        ("sampling.min_p=2", "sampling.top_p=1.0 and sampling.min_p=0.0 switch them off"),
        ("engine.device=gpu", "expected cpu or cuda:N"),
        ("model.dtype=float16", "set model.dtype=bfloat16"),
        ("model.head_dtype=bfloat16", "set model.head_dtype=float32, or model.dtype=bfloat16"),
        ("sampling.max_tokens=512", "raise model.max_length"),
        ("trainer.token_budget=100", "raise it to at least that"),
        ("trainer.beta2=1.0", "both must lie in [0, 1)"),
        ("trainers=33", "raise group.per_step"),
        ("liveness.actor_timeout_s=1.5", "over twice"),
    ],
)
def test_settings_that_cannot_be_run_are_refused_with_the_way_out(override: str, way_out: str):
    assert way_out in refused(override)
