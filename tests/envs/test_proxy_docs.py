"""What docs/proxy.md shows is what happens."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted import ScriptedEngine, lease, settings

from streamrl.envs.environment import load_environment
from streamrl.envs.gateway import Gateway
from streamrl.envs.group import GroupResult, GroupRunner
from streamrl.envs.proxy import chat_completions, desk, requests, responses, routes
from streamrl.envs.split import Split
from streamrl.policy.tokenizer import EOS, character_tokenizer
from streamrl.types import Generation

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "proxy.md").read_text()
SNIPPETS = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, flags=re.DOTALL))
NAMES = re.findall(r"`streamrl launch env=([^`]+)`", PAGE)
TOKENIZER = character_tokenizer()


def engine() -> ScriptedEngine:
    def answer(_: Sequence[int], __: Any) -> Generation:
        ids = np.array(TOKENIZER.convert_tokens_to_ids(["7", EOS]), dtype=np.int32)
        return Generation(ids, np.full(2, -0.5, dtype=np.float32), [(0, 2)], "stop")

    return ScriptedEngine(answer)


async def play(name: str) -> GroupResult:
    config = settings(name)
    split = Split.of(load_environment(config), config)
    gateway = Gateway(config.gateway, 0)
    await gateway.start()
    try:
        return await GroupRunner(split, engine(), TOKENIZER, config, gateway).run_group(lease(2, prompt=7))
    finally:
        await gateway.stop()


def test_every_snippet_is_launched() -> None:
    assert {f"{name.partition(':')[0]}.py" for name in NAMES} == set(SNIPPETS)


@pytest.mark.parametrize("name", NAMES)
def test_a_snippet_is_an_environment_that_records_its_tokens(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("openai", reason="the OpenAI SDK is not installed")
    pytest.importorskip("anthropic", reason="the Anthropic SDK is not installed")
    for file, code in SNIPPETS.items():
        (tmp_path / file).write_text(code)
        monkeypatch.delitem(__import__("sys").modules, file.removesuffix(".py"), raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    result = asyncio.run(play(name))
    assert result.failures == []
    assert result.group is not None
    answer = TOKENIZER.convert_tokens_to_ids(["7", EOS])
    assert [each.tokens[each.sampled].tolist() for each in result.group.trajectories] == [answer, answer]
    assert set(result.group.rewards) <= {0.0, 1.0}


def test_the_numbers_of_the_page_are_those_of_the_code() -> None:
    assert routes.BODY_BYTES == 8 << 20
    assert routes.BODY_S == 60
    assert routes.KEEP_ALIVE_S == 10
    assert desk.CALLS_PER_SESSION == requests.CHOICES == 128
    assert desk.HELD_BYTES == 1 << 30
    assert responses.CONVERSATIONS == 256


def test_every_code_of_an_error_is_in_the_table() -> None:
    package = Path(chat_completions.__file__).parent
    source = "".join(path.read_text() for path in package.glob("*.py"))
    codes = set(re.findall(r'ApiError\(\s*\d+,\s*"(\w+)"', source))
    listed = set(
        re.findall(r"`(\w+)`", "".join(line.split("|")[2] for line in PAGE.splitlines() if re.match(r"\| \d", line)))
    )
    assert codes == listed
