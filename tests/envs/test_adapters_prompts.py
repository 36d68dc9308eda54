"""Files of prompts become tasks; what is wrong with a file is one line with its place."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_policy import FakePolicy
from scripted import play, says, settings

from streamrl.envs.adapters.prompts import Prompts
from streamrl.envs.adapters.rows import JsonLines
from streamrl.envs.environment import load_environment
from streamrl.errors import ConfigError

NAME = "streamrl.envs.adapters.prompts:Prompts"
ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}, {"prompt": "3+3=", "answer": "6"}]


def json_lines(folder: Path, *rows: Any) -> str:
    path = folder / "sums.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return str(path)


def refusal(**args: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        Prompts(**{"reward": "exact", **args})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_line_is_a_task_in_order(tmp_path: Path) -> None:
    env = Prompts(json_lines(tmp_path, *ROWS), "exact")
    assert len(env) == 3
    assert [(env.task(i).prompt, env.task(i).answer) for i in (2, 0, 1)] == [
        ("3+3=", "6"),
        ("1+1=", "2"),
        ("2+2=", "4"),
    ]
    assert env.task(1).metadata == ROWS[1]


def test_an_index_past_the_end_starts_over(tmp_path: Path) -> None:
    assert Prompts(json_lines(tmp_path, *ROWS), "exact").task(4).prompt == "2+2="


def test_empty_lines_are_no_rows_and_do_not_shift_the_line_numbers(tmp_path: Path) -> None:
    rows = JsonLines(Path(json_lines(tmp_path, ROWS[0], "", "  ", ROWS[1])))
    assert len(rows) == 2
    assert rows.row(1) == ROWS[1]
    assert rows.place(1).endswith("sums.jsonl:4")


def test_lines_of_several_bytes_per_character_are_found_again(tmp_path: Path) -> None:
    path = tmp_path / "umlauts.jsonl"
    path.write_text('{"prompt": "ä→ü", "answer": "é"}\n{"prompt": "日本", "answer": "b"}\n', encoding="utf-8")
    env = Prompts(str(path), "exact")
    assert [env.task(i).prompt for i in range(2)] == ["ä→ü", "日本"]


def test_a_template_takes_several_columns(tmp_path: Path) -> None:
    env = Prompts(json_lines(tmp_path, {"a": 1, "b": 2, "sum": 3}), "exact", prompt="{a}+{b}=", answer="sum")
    assert (env.task(0).prompt, env.task(0).answer) == ("1+2=", "3")


def test_a_run_of_the_ring_plays_a_row_and_the_reward_scores_it(tmp_path: Path) -> None:
    result = play(settings(NAME, path=json_lines(tmp_path, *ROWS[:1] * 3), reward="exact"), says("2$"))
    assert result.failures == []
    assert result.group is not None
    assert result.group.env == "prompts"
    assert result.group.rewards.tolist() == [1.0, 1.0]


def test_a_reward_function_gets_the_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scoring.py").write_text("def score(task, answer):\n    return task.metadata['bonus'] + len(answer)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "scoring", raising=False)
    env = Prompts(json_lines(tmp_path, {"prompt": "x", "bonus": 10}), "scoring:score", answer=None)
    assert asyncio.run(env.episode(env.task(0), FakePolicy("abc"))) == 13


def test_a_system_prompt_makes_it_a_chat(tmp_path: Path) -> None:
    env = Prompts(json_lines(tmp_path, *ROWS), "exact", system="Be brief.", stop="\n")
    policy = FakePolicy("2")
    assert asyncio.run(env.episode(env.task(0), policy)) == 1.0
    assert policy.asked == [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1="}]]
    assert policy.stops == ["\n"]


def test_messages_come_from_a_column_without_the_keys_that_are_null(tmp_path: Path) -> None:
    row = {"talk": [{"role": "user", "content": "hi", "name": None}], "answer": "ho"}
    env = Prompts(json_lines(tmp_path, row), "exact", messages="talk")
    policy = FakePolicy("ho")
    assert asyncio.run(env.episode(env.task(0), policy)) == 1.0
    assert policy.asked == [[{"role": "user", "content": "hi"}]]


def test_a_chat_demonstrates_its_reference_answer(tmp_path: Path) -> None:
    task = Prompts(json_lines(tmp_path, *ROWS), "exact", chat=True).task(0)
    assert list(task.demonstration) == [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]


def test_parquet_and_json_lines_with_the_same_rows_give_the_same_tasks(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pip install 'streamrl[data]'")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "sums.parquet")
    env, same = Prompts(str(tmp_path / "sums.parquet"), "exact"), Prompts(json_lines(tmp_path, *ROWS), "exact")
    assert [env.task(i) for i in range(3)] == [same.task(i) for i in range(3)]


def test_a_saved_data_set_is_loaded_with_its_split(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="pip install 'streamrl[data]'")
    parts = {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:1])}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "sums"))
    assert len(Prompts(str(tmp_path / "sums"), "exact")) == 3
    assert len(Prompts(str(tmp_path / "sums"), "exact", split="test")) == 1
    assert "'nope'" in refusal(path=str(tmp_path / "sums"), split="nope")


def test_what_is_no_json_is_named_by_file_and_line(tmp_path: Path) -> None:
    path = json_lines(tmp_path, ROWS[0], "{not json")
    assert refusal(path=path).startswith(f"{path}:2: not valid JSON: ")


def test_a_line_that_is_no_object_is_named(tmp_path: Path) -> None:
    path = json_lines(tmp_path, ROWS[0], "", "[1]")
    assert refusal(path=path) == f"{path}:3: expected an object with columns, got list"


def test_a_missing_column_names_those_that_are_there(tmp_path: Path) -> None:
    path = json_lines(tmp_path, {"question": "1+1=", "answer": "2"})
    assert refusal(path=path) == (
        f"{path}:1: no column 'prompt'; its columns: question, answer; choose one by env.args.prompt"
    )


def test_a_row_without_an_answer_is_refused_unless_none_is_wanted(tmp_path: Path) -> None:
    path = json_lines(tmp_path, ROWS[0], {"prompt": "x"})
    assert "sums.jsonl:2: no column 'answer'" in refusal(path=path)
    assert Prompts(path, "exact", answer=None).task(1).answer is None


def test_a_template_with_an_unknown_column_names_the_nearest(tmp_path: Path) -> None:
    path = json_lines(tmp_path, {"question": "x", "answer": "y"})
    message = refusal(path=path, prompt="{qestion}?")
    assert message.startswith(f"{path}:1: 'qestion'")
    assert "did you mean 'question'?" in message


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ("hi", "expected a list of chat messages"),
        ([], "expected a list of chat messages"),
        ([{"content": "x"}], "message 0 needs a role"),
        ([{"role": "user"}], "message 0 needs content"),
        (
            [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
            "the last message is the assistant's",
        ),
    ],
)
def test_messages_that_cannot_be_asked_are_refused(tmp_path: Path, messages: Any, reason: str) -> None:
    path = json_lines(tmp_path, {"talk": messages, "answer": "y"})
    assert refusal(path=path, messages="talk").startswith(f"{path}:1: {reason}")


def test_a_prompt_and_messages_exclude_each_other(tmp_path: Path) -> None:
    assert refusal(path=json_lines(tmp_path, *ROWS), prompt="prompt", messages="talk").startswith("env.args.messages")


def test_a_missing_file_and_an_empty_one_are_refused(tmp_path: Path) -> None:
    assert "no such file" in refusal(path=str(tmp_path / "none.jsonl"))
    (tmp_path / "empty.jsonl").write_text("\n")
    assert refusal(path=str(tmp_path / "empty.jsonl")).endswith("it has no rows")


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "prompts.csv").write_text("prompt\n")
    assert "expected a file .jsonl, .ndjson or .parquet, got 'prompts.csv'" in refusal(
        path=str(tmp_path / "prompts.csv")
    )


@pytest.mark.parametrize("package", ["pyarrow", "datasets"])
def test_a_missing_package_names_the_extra(tmp_path: Path, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    path = tmp_path / ("rows.parquet" if package == "pyarrow" else "rows")
    path.touch() if package == "pyarrow" else path.mkdir()
    assert "pip install 'streamrl[data]'" in refusal(path=str(path))


def test_the_loader_names_the_setting_that_holds_the_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"env.name=.*Prompts: .*sums.jsonl:1: no column 'prompt'"):
        load_environment(settings(NAME, path=json_lines(tmp_path, {"answer": 1}), reward="exact"))
