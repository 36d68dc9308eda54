"""Read settings: schema defaults, then a YAML file, then ``key=value`` overrides, then the command's flags (C12).

Strict: an unknown key is refused with its full path and the nearest valid one, an ill-typed value with what was
expected, and settings that contradict each other with the way out. Every failure is a ``ConfigError`` of one line.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from streamrl.errors import ConfigError
from streamrl.schema import Config
from streamrl.validation import validate

_PACKAGE = Path(__file__).resolve().parent


def conf_folder() -> Path:
    """Where the shipped configs lie: inside an installed package, or beside it in a checkout."""
    inside = _PACKAGE / "conf"
    return inside if inside.is_dir() else _PACKAGE.parent / "conf"


def load_config(
    source: str | None = None, overrides: Sequence[str] = (), flags: Mapping[str, object] | None = None
) -> Config:
    """The resolved, validated settings.

    ``source`` is the name of a shipped config (``quickstart``), a path to a YAML file, or None for ``base``.
    ``overrides`` are ``key=value`` with dotted keys and YAML values; ``flags`` map dotted keys to values and win.
    """
    path = _find(source or "base")
    tree = _read(path)
    _expand(tree, Config, str(path), "")
    for override in overrides:
        key, value = parse_override(override)
        _assign(tree, key, value, f"override {override!r}")
    for key, value in (flags or {}).items():
        _assign(tree, key, value, f"flag for {key!r}")
    return validate(_typed(tree))


def to_yaml(config: Config) -> str:
    """The resolved settings as YAML that ``load_config`` reads back to an equal ``Config``."""
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)


def parse_override(text: str) -> tuple[str, object]:
    """``a.b=value`` to (``a.b``, value); the value is YAML, or the text itself where it is not valid YAML."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"override {text!r}: expected key=value, such as max_lag=2 or env.args.family=chain_sum")
    try:
        return key.strip(), OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]))["value"]  # type: ignore[index, call-overload]
    except (yaml.YAMLError, OmegaConfBaseException):
        return key.strip(), value  # a template such as {expression}= is text, not YAML


def _find(source: str) -> Path:
    folder = conf_folder()
    shipped = {path.stem: path for path in sorted(folder.glob("*.yaml"))}
    if source in shipped:
        return shipped[source]
    path = Path(source)
    if path.is_file():
        return path
    near = difflib.get_close_matches(source, shipped, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"--config {source!r}: no such file, and shipped are {', '.join(shipped)}{hint}")


def _read(path: Path) -> dict[str, Any]:
    try:
        tree = OmegaConf.to_container(OmegaConf.load(path))
    except (yaml.YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        detail = " ".join(str(error).split())
        raise ConfigError(f"{path}: cannot be read as YAML: {detail}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected a mapping of settings, got {type(tree).__name__}")
    return tree  # type: ignore[return-value]


def _assign(tree: dict[str, Any], key: str, value: object, where: str) -> None:
    parts = key.split(".")
    nested: Any = value
    for part in reversed(parts):
        nested = {part: nested}
    _expand(nested, Config, where, "")
    _merge(tree, nested)


def _merge(into: dict[str, Any], update: dict[str, Any]) -> None:
    for key, value in update.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _expand(tree: dict[str, Any], schema: type, where: str, prefix: str) -> None:
    """Check the keys of ``tree`` against the dataclass ``schema``; expand ``section: value`` to its name, in place."""
    hints = get_type_hints(schema)
    for key in list(tree):
        path = f"{prefix}{key}"
        if key not in hints:
            raise ConfigError(_unknown_key(where, str(key), path, schema, prefix))
        hint = hints[key]
        if dataclasses.is_dataclass(hint):
            if not isinstance(tree[key], dict):
                first = dataclasses.fields(hint)[0].name
                if first != "name":
                    raise ConfigError(
                        f"{where}: {path} is a section, got {tree[key]!r}; set one of its keys: "
                        f"{', '.join(field.name for field in dataclasses.fields(hint))}"
                    )
                tree[key] = _preset(key, tree[key])
            _expand(tree[key], hint, where, f"{path}.")  # type: ignore[arg-type]
        else:
            _check_type(tree[key], hint, path, where)


def _preset(section: str, name: object) -> dict[str, Any]:
    """``section=name``: the settings of ``conf/<section>/<name>.yaml`` where that is shipped, else the name alone."""
    path = conf_folder() / section / f"{name}.yaml"
    return {"name": name} | (_read(path) if path.is_file() else {})


def _unknown_key(where: str, key: str, path: str, schema: type, prefix: str) -> str:
    siblings = [prefix + field.name for field in dataclasses.fields(schema)]
    near = (
        [known for known in all_keys() if known.rpartition(".")[2] == key]  # the right name in another section
        or difflib.get_close_matches(path, siblings, n=1)
        or difflib.get_close_matches(path, all_keys(), n=1, cutoff=0.4)
    )
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
    return f"{where}: unknown key {path!r}{hint}"


def all_keys(schema: type = Config, prefix: str = "") -> list[str]:
    """Every dotted key of the schema, sections included."""
    keys: list[str] = []
    for name, hint in get_type_hints(schema).items():
        keys.append(prefix + name)
        if dataclasses.is_dataclass(hint):
            keys += all_keys(hint, f"{prefix}{name}.")  # type: ignore[arg-type]
    return keys


def _check_type(value: object, hint: Any, path: str, where: str) -> None:
    if get_origin(hint) is dict:
        if not isinstance(value, dict):
            raise ConfigError(f"{where}: {path} expects a mapping, got {value!r}")
        return
    if get_origin(hint) is list:
        if not isinstance(value, list) or not all(isinstance(each, get_args(hint)) for each in value):
            raise ConfigError(f"{where}: {path} expects a list of {get_args(hint)[0].__name__}, got {value!r}")
        return
    allowed = get_args(hint) or (hint,)
    expected = (*allowed, int) if float in allowed else allowed
    wrong_bool = isinstance(value, bool) and bool not in allowed
    number_as_text = str in allowed and isinstance(value, int | float) and not isinstance(value, bool)
    if number_as_text:
        return  # run=7 names a run; OmegaConf turns it to text
    if wrong_bool or not isinstance(value, expected):
        named = " or ".join("null" if kind is type(None) else kind.__name__ for kind in allowed)
        raise ConfigError(f"{where}: {path} expects {named}, got {value!r} ({type(value).__name__})")


def _typed(tree: dict[str, Any]) -> Config:
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(tree))
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0]) from error
    assert isinstance(config, Config)
    return config
