"""The types of fields that headers share, with the limits that a decoder checks."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

TRACEBACK_CHARACTERS = 8192
"""Of a failure's traceback, the last ones are sent."""

Count = Annotated[int, Meta(ge=0, lt=1 << 53)]
Name = Annotated[str, Meta(max_length=512)]
Text = Annotated[str, Meta(max_length=TRACEBACK_CHARACTERS)]

Spans = list[tuple[Count, Annotated[int, Meta(ge=1, lt=1 << 53)]]]
"""(version, count) runs over the sampled tokens, as ``types.VersionSpans``."""
