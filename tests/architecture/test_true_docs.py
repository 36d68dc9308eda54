"""What README and docs name exists: paths, modules, commands, config keys, metrics."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from streamrl.cli import build_parser
from streamrl.config import all_keys
from streamrl.metrics import EVAL_KEYS, KEYS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
WRITTEN_BY_A_RUN = ("config.yaml", "metrics.jsonl", "events.jsonl", "summary.json", "wandb/")
SOURCES = "\n".join(path.read_text() for path in (ROOT / "streamrl").rglob("*.py"))


def code(page: Path) -> list[str]:
    """Inline code and the lines of fenced blocks."""
    text = page.read_text()
    blocks = re.findall(r"```[a-z]*\n(.*?)```", text, flags=re.S)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S))
    return inline + [line for block in blocks for line in block.splitlines()]


def mentioned(pattern: str) -> list[tuple[str, str]]:
    return [(page.name, found) for page in PAGES for span in code(page) for found in re.findall(pattern, span)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_exists(page: Path):
    named = {span for span in code(page) if re.fullmatch(r"[\w./-]+/[\w.-]*|[\w-]+\.(py|md|yaml|toml)", span)}
    ours = {path for path in named if path.split("/")[0] in {entry.name for entry in ROOT.iterdir()}}
    beside_a_module = {"rollouter.py", "trainer.py", "my_env.py"}
    files = {path for path in named if "/" not in path} - set(WRITTEN_BY_A_RUN) - beside_a_module
    missing = [path for path in ours | files if not (ROOT / path).exists() and not (ROOT / "conf" / path).exists()]
    assert missing == []


def test_every_streamrl_command_parses():
    commands = [line.strip() for page in PAGES for line in code(page) if line.strip().startswith("streamrl ")]
    assert commands
    for command in commands:
        words = [word for word in re.sub(r"#.*", "", command).split()[1:] if not word.startswith(("<", "…"))]
        if words[0] in ("--help", "--version"):
            continue
        try:
            build_parser().parse_known_args(["ring" if word == "NAME" else word for word in words])
        except SystemExit:
            pytest.fail(f"{command} is not a command")


def test_every_dotted_setting_is_a_key():
    sections = {key for key in all_keys() if "." not in key and any(k.startswith(f"{key}.") for k in all_keys())}
    wrong = []
    for page, key in mentioned(r"(?<![\w/.`-])([a-z_]+\.[a-z_.]+)(?==|$|\s)"):
        known = key in all_keys() or any(
            key.startswith(f"{free}.") for free in ("env.args", "model.args", "engine.args")
        )
        if (
            key.split(".")[0] in sections
            and not known
            and not (ROOT / key).exists()
            and not key.endswith((".py", ".md"))
        ):
            wrong.append((page, key))
    assert wrong == []


def test_the_metrics_page_lists_exactly_the_metrics():
    text = (ROOT / "docs" / "metrics.md").read_text()
    table = text[text.index("| key |") :]
    listed = set(
        re.findall(r"`([a-z0-9_]+(?:/[a-z0-9_]+)?)`", "\n".join(re.findall(r"^\| (.*?) \|", table, flags=re.M)))
    )
    assert listed - {"reward/<env>/mean"} == set(KEYS) | set(EVAL_KEYS)


def test_every_shipped_config_has_a_line_in_the_readme():
    readme = (ROOT / "README.md").read_text()
    missing = [path.name for path in (ROOT / "conf").glob("*.yaml") if f"conf/{path.name}" not in readme]
    assert missing == []


def test_every_make_target_exists():
    makefile = (ROOT / "Makefile").read_text()
    for page, target in mentioned(r"^make ([a-z-]+)"):
        assert f"\n{target}:" in makefile, (page, target)


def test_the_environment_in_the_readme_is_the_tested_example():
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    assert block is not None
    assert block[1].strip() in (ROOT / "examples" / "ten_lines.py").read_text()
