"""From a Python signature to what the model is told about a tool, and from what the model wrote to a call.

Schemas and checks come from msgspec, so whatever it can convert may stand in an annotation: numbers, strings, bools,
``Literal``, ``Enum``, lists, dicts, ``Optional``, dataclasses and ``TypedDict``.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec

from streamrl.envs.loading import nearest
from streamrl.errors import ConfigError

STATE = "state"
"""A parameter of this name gets the episode's state. The model does not see it."""

_SECTION = re.compile(r"^(Args|Returns|Yields|Raises|Examples?|Notes?):\s*$", flags=re.MULTILINE)
_ITEM = re.compile(r"\s+(\w+)(?: ?\([^)]*\))?:\s*(.*)")
"""``name: what it is`` or ``name (type): what it is``."""


class BadArguments(ValueError):
    """What the model wrote cannot be passed to the tool; the message is for the model."""


@dataclass(frozen=True)
class Signature:
    """The parameters of one tool that the model fills in."""

    function: Callable[..., Any]
    name: str
    takes_state: bool
    description: str
    parameter_texts: Mapping[str, str]
    """Descriptions by parameter, from the ``Args:`` section of the docstring."""

    @classmethod
    def of(cls, function: Callable[..., Any], name: str) -> Signature:
        """Raises ``ConfigError`` for a signature that cannot be offered to a model.

        Annotations may name what is defined later: they are read when the schema is first asked for.
        """
        parameters = _parameters(function)
        summary, texts = described(inspect.getdoc(function) or "")
        check_parameters(name, parameters, texts)
        return cls(function, name, STATE in parameters, summary, texts)

    @cached_property
    def schema(self) -> dict[str, Any]:
        """JSON schema of the arguments, without references."""
        full = msgspec.json.schema(self._struct)
        definitions = full.pop("$defs")
        try:
            schema = _inlined(full, definitions, ())
        except RecursionError as error:
            raise ConfigError(f"tool {self.name!r}: {error}, so no model can be told of it; use dict") from None
        for name, parameter in _parameters(self.function).items():
            if name in schema["properties"] and parameter.default not in (parameter.empty, None):
                schema["properties"][name]["default"] = msgspec.to_builtins(parameter.default)
        return {key: value for key, value in schema.items() if key != "title"}

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments of the types that the function declares, from JSON values.

        Text of a number is taken for the number and the other way round. What was left out is left to the function's
        defaults. Raises ``BadArguments`` of one line.
        """
        for name in given:
            if name not in self.schema["properties"]:
                raise BadArguments(f"{self.name} has no argument {name!r}{nearest(name, self.schema['properties'])}")
        texts = [name for name, each in self.schema["properties"].items() if each.get("type") == "string"]
        values = {name: _as_text(value) if name in texts else value for name, value in given.items()}
        try:
            converted = msgspec.convert(values, self._struct, strict=False)
        except msgspec.ValidationError as error:
            raise BadArguments(f"{self.name}: {_readable(str(error))}") from None
        taken = {name: getattr(converted, name) for name in self.schema["properties"]}
        return {name: value for name, value in taken.items() if value is not msgspec.UNSET}

    @cached_property
    def _struct(self) -> type[msgspec.Struct]:
        try:
            hints = get_type_hints(self.function, include_extras=True)
        except NameError as error:
            raise ConfigError(f"tool {self.name!r}: an annotation cannot be read: {error}") from error
        fields: list[Any] = []
        for name, parameter in _parameters(self.function).items():
            if name == STATE:
                continue
            hint = _with_text(hints[name], self.parameter_texts.get(name))
            _check_supported(hint, name, self.name)
            if parameter.default is parameter.empty:
                fields.append((name, hint))
            else:
                optional = hint | None if parameter.default is None else hint
                fields.append((name, optional | msgspec.UnsetType, msgspec.UNSET))
        return msgspec.defstruct("arguments", fields, kw_only=True, forbid_unknown_fields=True)


def check_parameters(tool: str, parameters: Mapping[str, inspect.Parameter], texts: Mapping[str, str]) -> None:
    """Raise ``ConfigError`` for the first parameter that a model cannot fill in, or that is described and not there."""
    for each in parameters.values():
        if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD, each.POSITIONAL_ONLY):
            raise ConfigError(f"tool {tool!r}: a model cannot fill in the parameter `{each}`; give each one a name")
        if each.annotation is each.empty and each.name != STATE:
            raise ConfigError(f"tool {tool!r}: parameter {each.name!r} has no type; write `{each.name}: str`, say")
    for wrong in sorted(texts.keys() - parameters.keys()):
        raise ConfigError(
            f"tool {tool!r}: its docstring describes {wrong!r}, which is no parameter{nearest(wrong, parameters)}"
        )


def described(docstring: str) -> tuple[str, dict[str, str]]:
    """What a docstring says of the tool, and of each parameter in its ``Args:`` section."""
    parts = _SECTION.split(docstring)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    texts: dict[str, str] = {}
    name, indent = "", 0
    for line in sections.get("Args", "").splitlines():
        item, depth = _ITEM.match(line), len(line) - len(line.lstrip())
        if item and (not texts or depth == indent):
            name, indent = item[1], depth
            texts[name] = item[2]
        elif name:
            texts[name] += f" {line.strip()}"
    return " ".join(parts[0].split()), {each: text.strip() for each, text in texts.items()}


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


def _with_text(hint: Any, text: str | None) -> Any:
    """The annotation with its description: from the docstring, else a string in ``Annotated[int, "…"]``."""
    if text is None and get_origin(hint) is Annotated:
        text = next((each for each in get_args(hint)[1:] if isinstance(each, str)), None)
    return hint if text is None else Annotated[hint, msgspec.Meta(description=text)]


def _check_supported(hint: Any, parameter: str, tool: str) -> None:
    try:
        msgspec.json.schema(hint)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"tool {tool!r}: parameter {parameter!r}: {str(error).splitlines()[-1]}; use int, float, str, bool, "
            "Literal, Enum, list, dict, Optional, a dataclass or a TypedDict"
        ) from error


def _inlined(schema: Any, definitions: Mapping[str, Any], inside: tuple[str, ...]) -> Any:
    """``schema`` with its references replaced by what they refer to; chat templates show it as it stands."""
    if isinstance(schema, list):
        return [_inlined(each, definitions, inside) for each in schema]
    if not isinstance(schema, dict):
        return schema
    own = {key: _inlined(value, definitions, inside) for key, value in schema.items() if key != "$ref"}
    if "$ref" not in schema:
        return own
    name = schema["$ref"].rpartition("/")[2]
    if name in inside:
        raise RecursionError(f"the type {name} contains itself")
    target = _inlined(copy.deepcopy(definitions[name]), definitions, (*inside, name))
    return {key: value for key, value in target.items() if key != "title"} | own


def _as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _readable(message: str) -> str:
    """msgspec's words in those of a model's: ``$.a`` is the argument ``a``."""
    message = re.sub(r"Object missing required field `(\w+)`", r"it needs the argument '\1'", message)
    return re.sub(r" - at `\$\.?([^`]*)`", r" at argument '\1'", message).replace("`", "")
