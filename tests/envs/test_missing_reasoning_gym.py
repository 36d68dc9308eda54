"""Without the extra, the environment says which one to install."""

import sys

import pytest

from streamrl.envs.reasoning_gym import ReasoningGym
from streamrl.errors import ConfigError


def test_a_missing_reasoning_gym_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"pip install 'streamrl\[envs\]'"):
        ReasoningGym()
