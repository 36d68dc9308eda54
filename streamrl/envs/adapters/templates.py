"""Templates such as ``{question}=`` that people write into settings, over the fields of a row or an observation."""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any

from streamrl.envs.loading import nearest
from streamrl.errors import ConfigError


def fields_of(template: str, key: str) -> list[str]:
    """Names of the fields that ``template``, the value of the setting ``key``, uses, in order."""
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ConfigError(f"{key}={template!r}: {error}") from error
    return [name.partition(".")[0].partition("[")[0] for name in names]


def filled(template: str, fields: Mapping[str, Any], key: str, place: str) -> str:
    """``template`` with ``fields`` in it; raises ``ConfigError`` that names ``place`` where one is missing or None."""
    for name in fields_of(template, key):
        if fields.get(name) is None:
            state = "is null" if name in fields else f"is missing{nearest(name, fields)}"
            raise ConfigError(f"{place}: {name!r} of {key}={template!r} {state}")
    try:
        return template.format(**fields)
    except (ValueError, AttributeError, LookupError, TypeError) as error:
        raise ConfigError(f"{place}: {key}={template!r} cannot be filled in: {error}") from error
