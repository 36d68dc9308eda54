"""User code by its path ``package.module:name``: found, imported, or refused in one line."""

from __future__ import annotations

import difflib
import importlib
import os
import pkgutil
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

from streamrl.envs.failure import one_line
from streamrl.errors import ConfigError


def import_module_of(path: str, key: str, example: str) -> tuple[types.ModuleType, str]:
    """Module and name that ``path``, the value of the setting ``key``, consists of.

    The current working directory can be imported from. Raises ``ConfigError`` of one line.
    """
    module_name, colon, name = path.partition(":")
    if not colon or not module_name or not name:
        raise ConfigError(f"{key}={path!r}: expected package.module:Name, such as {example}")
    return _import(module_name, f"{key}={path}"), name


def load_function(path: str, key: str) -> Callable[..., Any]:
    """The function that the setting ``key`` names. Raises ``ConfigError`` of one line."""
    module, name = import_module_of(path, key, "my_module:my_function")
    target = getattr(module, name, None)
    if not callable(target):
        offered = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
        raise ConfigError(f"{key}={path}: {module.__name__} has no function {name!r}{nearest(name, offered)}")
    return target


def nearest(name: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?``, or what there is to choose from, or nothing."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    if near:
        return f"; did you mean {' or '.join(repr(each) for each in near)}?"
    if 0 < len(names) <= 12:
        return f"; there are: {', '.join(names)}"
    return "" if names else "; it has none"


def _import(module_name: str, where: str) -> types.ModuleType:
    folder = os.getcwd()
    if folder not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing == module_name or module_name.startswith(f"{missing}."):
            hint = nearest(module_name, _modules_beside(module_name))
            raise ConfigError(f"{where}: no module {missing!r} on the path or in {folder}{hint}") from error
        raise ConfigError(f"{where}: {module_name} imports {missing!r}, which is not installed") from error
    except (Exception, SystemExit) as error:  # user code may raise anything while it is imported; it is named
        raise ConfigError(f"{where}: importing {module_name} raised {one_line(error)}") from error


def _modules_beside(module_name: str) -> list[str]:
    package, dot, _ = module_name.rpartition(".")
    parent = sys.modules.get(package)
    paths = list(parent.__path__) if parent is not None and hasattr(parent, "__path__") else [os.getcwd()]
    found = [f"{package}{dot}{info.name}" for info in pkgutil.iter_modules(paths)]
    return difflib.get_close_matches(module_name, found, n=1)
