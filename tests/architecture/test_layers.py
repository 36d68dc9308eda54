"""The tree is what docs/architecture.md says: imports point one way, files stay small, light modules stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "streamrl"
MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))

LAYERS = [
    {"cli"},
    {"launching", "attaching", "checking", "bench"},
    {"pipeline"},
    {"actors"},
    {"monitor"},
    {"runtime", "engines", "envs", "policy"},
    {"buffers", "sync", "loss"},
    {"staleness", "steering", "parity"},
    {"config"},
    {"validation"},
    {"lora", "ports", "metrics", "sharing", "objective_checks", "engine_checks", "sync_checks"},
    {"nixl"},
    {"types", "schema", "objectives", "errors", "clock"},
    {"objective_params", "lora_schema", "sync_schema"},
    {"__init__"},
]
"""From the top: a part imports from the layers below it, and from itself; never from its siblings."""

LONGER_THAN_400: dict[str, str] = {}
"""Files that may be longer, with the reason."""

LIGHT = (
    "cli",
    "config",
    "types",
    "schema",
    "lora",
    "lora_schema",
    "sync_schema",
    "sync_checks",
    "validation",
    "staleness",
    "errors",
    "metrics",
    "ports",
    "objectives",
    "steering",
)


def part(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def imported(path: Path) -> set[str]:
    tree = ast.parse((PACKAGE / path).read_text())
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "streamrl":
            names = [node.module] if node.module != "streamrl" else [f"streamrl.{alias.name}" for alias in node.names]
            found |= {part(name) if (PACKAGE / name.split(".")[1]).exists() or
                      (PACKAGE / f"{name.split('.')[1]}.py").exists() else "__init__"
                      for name in names if "." in name}  # fmt: skip
        if isinstance(node, ast.Import):
            found |= {part(alias.name) for alias in node.names if alias.name.split(".")[0] == "streamrl"}
    return found


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_imports_point_one_way(path: Path):
    own = path.parts[0].removesuffix(".py")
    height = {name: level for level, names in enumerate(LAYERS) for name in names}
    assert own in height, f"{own} has no layer"
    upward = [name for name in imported(path) if name != own and height[name] <= height[own]]
    assert upward == []


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_no_file_has_outgrown_its_room(path: Path):
    lines = len((PACKAGE / path).read_text().splitlines())
    assert lines <= 400 or str(path) in LONGER_THAN_400


def test_help_and_config_never_import_torch():
    code = f"import sys; {'; '.join(f'import streamrl.{name}' for name in LIGHT)}; print(*sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {"torch", "transformers", "zmq", "wandb"} & set(output.split())


def test_the_buffer_needs_no_torch():
    code = "import sys, streamrl.actors.buffer; print(*sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "torch" not in output.split()
