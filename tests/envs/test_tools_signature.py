"""What a model is told of a Python function, and what of its answer the function gets."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypedDict

import pytest

from streamrl.envs.tools.function import FunctionTool, tool
from streamrl.envs.tools.signature import BadArguments, Signature, described
from streamrl.errors import ConfigError


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Point:
    """A place."""

    x: int
    y: float = 0.0
    tags: list[str] = field(default_factory=list)


class Box(TypedDict):
    width: int


def draw(
    count: int,
    colour: Colour,
    at: Point,
    style: Literal["solid", "dashed"] = "solid",
    box: Box | None = None,
    labels: dict[str, list[float]] = {},  # noqa: B006 what a user may write
    state: Any = None,
) -> str:
    """Draw points
    on the canvas.

    Args:
        count (int): how many,
            at least one
        at: where

    Returns:
        nothing of interest
    """
    raise NotImplementedError


def signature(function: Any = draw) -> Signature:
    return Signature.of(function, function.__name__)


def test_the_schema_names_types_defaults_and_what_is_needed_without_references() -> None:
    point = {
        "type": "object",
        "description": "where",
        "properties": {
            "x": {"type": "integer"},
            "y": {"type": "number", "default": 0.0},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["x"],
    }
    box = {"type": "object", "properties": {"width": {"type": "integer"}}, "required": ["width"]}
    assert signature().schema == {
        "type": "object",
        "properties": {
            "count": {"type": "integer", "description": "how many, at least one"},
            "colour": {"enum": ["blue", "red"]},
            "at": point,
            "style": {"enum": ["dashed", "solid"], "default": "solid"},
            "box": {"anyOf": [box, {"type": "null"}]},
            "labels": {
                "type": "object",
                "additionalProperties": {"type": "array", "items": {"type": "number"}},
                "default": {},
            },
        },
        "required": ["count", "colour", "at"],
        "additionalProperties": False,
    }


def test_the_docstring_is_the_description_without_its_sections() -> None:
    assert FunctionTool.of(draw).description == "Draw points on the canvas."


def test_a_section_may_describe_parameters_over_several_lines() -> None:
    text = "Do.\n\nArgs:\n    a: one\n      and more: of it\n    b (str, optional): two\nRaises:\n    c: three"
    assert described(text) == ("Do.", {"a": "one and more: of it", "b": "two"})


def test_a_string_in_an_annotation_describes_its_parameter() -> None:
    def look(name: Annotated[str, "whom to look for"]) -> str:
        raise NotImplementedError

    assert signature(look).schema["properties"]["name"] == {"type": "string", "description": "whom to look for"}


def test_arguments_arrive_in_the_types_that_the_function_declares() -> None:
    given = {"count": "3", "colour": "red", "at": {"x": 1, "y": 2}, "labels": {"a": [1, 2.5]}}
    assert signature().arguments(given) == {
        "count": 3,
        "colour": Colour.RED,
        "at": Point(1, 2.0),
        "labels": {"a": [1.0, 2.5]},
    }


def test_what_is_left_out_is_left_to_the_function() -> None:
    assert signature().arguments({"count": 1, "colour": "blue", "at": {"x": 1}}).keys() == {"count", "colour", "at"}


def test_a_number_is_taken_for_the_text_that_a_function_wants() -> None:
    def calc(expression: str) -> str:
        raise NotImplementedError

    assert signature(calc).arguments({"expression": 12}) == {"expression": "12"}


def test_null_is_taken_where_none_is_the_default() -> None:
    def find(limit: int = None) -> str:  # type: ignore[assignment]
        raise NotImplementedError

    assert signature(find).arguments({"limit": None}) == {"limit": None}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"colour": "red", "at": {"x": 1}}, "draw: it needs the argument 'count'"),
        ({"count": "many", "colour": "red", "at": {"x": 1}}, "draw: Expected int, got str at argument 'count'"),
        ({"count": True, "colour": "red", "at": {"x": 1}}, "draw: Expected int, got bool at argument 'count'"),
        ({"count": 1, "colour": "green", "at": {"x": 1}}, "draw: Invalid enum value 'green' at argument 'colour'"),
        ({"count": 1, "colour": "red", "at": {"x": "a"}}, "draw: Expected int, got str at argument 'at.x'"),
        ({"cuont": 1}, "draw has no argument 'cuont'; did you mean 'count'?"),
        ({"state": 1}, "draw has no argument 'state'; did you mean 'style'?"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_in_one_line(given: dict[str, Any], message: str) -> None:
    with pytest.raises(BadArguments) as caught:
        signature().arguments(given)
    assert str(caught.value) == message


def untyped(a) -> str:  # type: ignore[no-untyped-def]
    raise NotImplementedError


def starred(*words: str) -> str:
    raise NotImplementedError


def misdescribed(first: int) -> str:
    """Do.

    Args:
        frist: the first
    """
    raise NotImplementedError


def strange(a: complex) -> str:
    raise NotImplementedError


@dataclass
class Node:
    children: list[Node]


def endless(node: Node) -> str:
    raise NotImplementedError


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (untyped, "tool 'untyped': parameter 'a' has no type; write `a: str`, say"),
        (starred, "tool 'starred': a model cannot fill in the parameter `*words: 'str'`; give each one a name"),
        (
            misdescribed,
            "tool 'misdescribed': its docstring describes 'frist', which is no parameter; did you mean 'first'?",
        ),
        (
            strange,
            "tool 'strange': parameter 'a': type <class 'complex'> is not supported; use int, float, str, bool, "
            "Literal, Enum, list, dict, Optional, a dataclass or a TypedDict",
        ),
        (endless, "tool 'endless': the type Node contains itself, so no model can be told of it; use dict"),
        (3, "tools: expected a function with typed parameters or an McpServer, got 3"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_refused_in_one_line(function: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _ = FunctionTool.of(function).schema
    assert str(caught.value) == message


def test_a_method_without_types_is_refused_where_it_is_marked() -> None:
    with pytest.raises(ConfigError, match="tool 'calc': parameter 'expression' has no type"):

        class Calculator:
            @tool
            def calc(self, expression):  # type: ignore[no-untyped-def]
                raise NotImplementedError
