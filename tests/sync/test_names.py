"""The table from the names that travel to those that an engine loads by."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamrl.errors import WeightSyncError
from streamrl.sync.manifest import plan_manifest
from streamrl.sync.names import NameMap, Wanted, Window, contiguous_strides, same_names
from streamrl.sync.staging import slot_memory, tensors_in

EXPERTS = {"gate_up": (2, 6, 4)}
"""Two experts, three rows each of gate and up."""
HALVES = {"gate": (3, 4), "up": (3, 4)}


def part(source: str, offset: int, *shape: int, strides: tuple[int, ...] | None = None) -> Window:
    return Window(source, offset, shape, contiguous_strides(shape) if strides is None else strides)


def numbered(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Every element another number."""
    starts = [0]
    for shape in shapes.values():
        starts.append(starts[-1] + math.prod(shape))
    return {
        name: torch.arange(first, last).view(shape)
        for (name, shape), (first, last) in zip(shapes.items(), pairwise(starts), strict=True)
    }


@pytest.mark.parametrize(
    ("shapes", "wanted", "expected"),
    [
        pytest.param(
            {"router.weight": (2, 2)},
            [Wanted("gate.weight", (part("router.weight", 0, 2, 2),))],
            {"gate.weight": [[0, 1], [2, 3]]},
            id="another name",
        ),
        pytest.param(
            {"w": (2, 3)},
            [Wanted("w", (part("w", 0, 3, 2, strides=(1, 3)),))],
            {"w": [[0, 3], [1, 4], [2, 5]]},
            id="turned",
        ),
        pytest.param(
            {"w": (2, 2, 1)},
            [
                Wanted("0.gate", (part("w", 0, 1, 1),)),
                Wanted("0.up", (part("w", 1, 1, 1),)),
                Wanted("1.gate", (part("w", 2, 1, 1),)),
                Wanted("1.up", (part("w", 3, 1, 1),)),
            ],
            {"0.gate": [[0]], "0.up": [[1]], "1.gate": [[2]], "1.up": [[3]]},
            id="a stack of fused experts into one tensor for each expert and half",
        ),
        pytest.param(
            {"gate": (1, 2), "up": (2, 2)},
            [Wanted("gate_up", (part("gate", 0, 1, 2), part("up", 0, 2, 2)))],
            {"gate_up": [[0, 1], [2, 3], [4, 5]]},
            id="put together by rows",
        ),
        pytest.param(
            {"gate": (2, 1), "up": (2, 2)},
            [Wanted("gate_up", (part("gate", 0, 2, 1), part("up", 0, 2, 2)), axis=1)],
            {"gate_up": [[0, 2, 3], [1, 4, 5]]},
            id="put together by columns",
        ),
        pytest.param(
            {"gate": (0, 2), "up": (1, 2)},
            [Wanted("gate_up", (part("gate", 0, 0, 2), part("up", 0, 1, 2)))],
            {"gate_up": [[0, 1]]},
            id="with a part that is empty",
        ),
        pytest.param({"w": (0, 2)}, [Wanted("v", (part("w", 0, 0, 2),))], {"v": []}, id="an empty one"),
        pytest.param({"s": ()}, [Wanted("t", (part("s", 0),))], {"t": 0}, id="a single number"),
    ],
)
def test_a_table_is_applied(shapes: dict, wanted: list[Wanted], expected: dict[str, list]) -> None:
    names = NameMap(shapes, wanted)
    found = names.apply(numbered(shapes))
    assert {name: tensor.tolist() for name, tensor in found.items()} == expected
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == names.shapes


@pytest.mark.parametrize(
    ("shapes", "wanted", "message"),
    [
        pytest.param({"a": (2,)}, [], "no tensor that the engine loads has element 0 of a", id="left out"),
        pytest.param(
            {"a": (2,)},
            [Wanted("x", (part("a", 0, 1),))],
            "no tensor that the engine loads has element 1 of a",
            id="half left out",
        ),
        pytest.param(
            {"a": (3,)},
            [Wanted("x", (part("a", 0, 1),)), Wanted("y", (part("a", 2, 1),))],
            "no tensor that the engine loads has element 1 of a",
            id="one in the middle left out",
        ),
        pytest.param(
            {"a": (2, 4)},
            [Wanted("x", (part("a", 0, 2, 2, strides=(4, 1)),)), Wanted("y", (part("a", 1, 2, 2, strides=(4, 1)),))],
            "y takes element 1 of a, which another tensor has",
            id="columns that overlap, though together they are as many",
        ),
        pytest.param(
            {"a": (2,)}, [Wanted("x", (part("a", 0, 2, strides=(0,)),))], "x takes element 0 of a, which", id="repeated"
        ),
        pytest.param(
            {"a": (2,)},
            [Wanted("x", (part("a", 0, 1),)), Wanted("y", (part("a", 0, 1),))],
            "y takes element 0 of a, which another tensor has",
            id="twice the same",
        ),
        pytest.param(
            {"a": (2,)}, [Wanted("x", (part("a", 1, 2),))], "x takes element 2 of a, which has 2", id="beyond the end"
        ),
        pytest.param({}, [Wanted("x", (part("a", 0, 1),))], "x is made of a, which does not travel", id="unknown"),
        pytest.param(
            {"a": (2,)},
            [Wanted("x", (part("a", 0, 1),)), Wanted("x", (part("a", 1, 1),))],
            "x is given twice",
            id="a name twice",
        ),
    ],
)
def test_a_table_that_is_not_one_to_one_is_refused(shapes: dict, wanted: list[Wanted], message: str) -> None:
    with pytest.raises(WeightSyncError, match=f"name map: {message}"):
        NameMap(shapes, wanted)


def test_parts_are_views_of_what_travels() -> None:
    sent = numbered(EXPERTS)
    wanted = [
        Wanted(f"{expert}.{half}", (part("gate_up", 24 * expert + 12 * index, 3, 4),))
        for expert in range(2)
        for index, half in enumerate(("gate", "up"))
    ]
    found = NameMap(EXPERTS, wanted).apply(sent)
    sent["gate_up"].add_(100)
    torch.testing.assert_close(found["1.up"], sent["gate_up"][1, 3:], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("columns", "view"), [(64, True), (63, False)], ids=["rows of 256 bytes", "a gap up to the next 256 bytes"]
)
def test_neighbours_of_a_manifest_are_put_together_without_a_copy_where_no_gap_is_between_them(
    columns: int, view: bool
) -> None:
    shapes = {"gate": (3, columns), "up": (2, columns)}
    plan = plan_manifest([(name, shape, "float32") for name, shape in shapes.items()], 1024)
    staged = tensors_in(plan, slot_memory(plan))
    for name, tensor in numbered(shapes).items():
        staged[name].copy_(tensor)
    names = NameMap(shapes, [Wanted("gate_up", tuple(part(name, 0, *shape) for name, shape in shapes.items()))])
    found = names.apply(staged)["gate_up"]
    torch.testing.assert_close(found, torch.arange(5 * columns).view(5, columns).float(), rtol=0, atol=0)
    assert (found.data_ptr() == staged["gate"].data_ptr()) is view
    assert len(plan.buckets) > 1, "and buckets between them do not matter"


def test_parts_in_another_order_than_they_lie_are_copied_into_the_right_one() -> None:
    names = NameMap(HALVES, [Wanted("up_gate", (part("up", 0, 3, 4), part("gate", 0, 3, 4)))])
    both = torch.arange(24).view(6, 4)
    found = names.apply({"gate": both[:3], "up": both[3:]})["up_gate"]
    assert found.tolist() == [*both[3:].tolist(), *both[:3].tolist()]


def test_parts_of_different_memory_are_put_together() -> None:
    names = NameMap(HALVES, [Wanted("gate_up", (part("gate", 0, 3, 4), part("up", 0, 3, 4)))])
    sent = {name: torch.arange(12).view(3, 4) for name in HALVES}
    assert names.apply(sent)["gate_up"].tolist() == sent["gate"].tolist() * 2


def test_a_tensor_that_does_not_lie_in_rows_is_read_by_its_values() -> None:
    shapes = {"w": (2, 3)}
    turned = torch.arange(6).view(3, 2).T
    assert same_names(shapes).apply({"w": turned})["w"].tolist() == turned.tolist()


@st.composite
def tables(draw: st.DrawFn) -> tuple[dict[str, tuple[int, ...]], dict[str, str], NameMap]:
    """Shapes, dtypes and a table: each tensor is passed on, turned, cut by rows, or joined with the next."""
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    wanted: list[Wanted] = []
    for index in range(draw(st.integers(1, 5))):
        name, rows, columns = f"t{index}", draw(st.integers(0, 5)), draw(st.sampled_from((1, 3, 64, 128)))
        dtype = draw(st.sampled_from(("float32", "bfloat16", "int64")))
        match draw(st.sampled_from(("same", "turned", "cut", "columns", "joined"))):
            case "same":
                shapes[name] = (rows, columns)
                wanted.append(Wanted(f"{name}.same", (part(name, 0, rows, columns),)))
            case "turned":
                shapes[name] = (rows, columns)
                wanted.append(Wanted(f"{name}.turned", (part(name, 0, columns, rows, strides=(1, columns)),)))
            case "cut":
                cut, shapes[name] = draw(st.integers(0, rows)), (rows, columns)
                wanted.append(Wanted(f"{name}.first", (part(name, 0, cut, columns),)))
                wanted.append(Wanted(f"{name}.second", (part(name, cut * columns, rows - cut, columns),)))
            case "columns":
                cut, shapes[name] = draw(st.integers(0, columns)), (rows, columns)
                wanted.append(Wanted(f"{name}.left", (part(name, 0, rows, cut, strides=(columns, 1)),)))
                right = part(name, cut, rows, columns - cut, strides=(columns, 1))
                wanted.append(Wanted(f"{name}.right", (right,)))
            case _:
                more = draw(st.integers(0, 3))
                shapes |= {name: (rows, columns), f"{name}+": (more, columns)}
                dtypes[f"{name}+"] = dtype
                parts = (part(name, 0, rows, columns), part(f"{name}+", 0, more, columns))
                wanted.append(Wanted(f"{name}.joined", parts))
        dtypes[name] = dtype
    return shapes, dtypes, NameMap(shapes, draw(st.permutations(wanted)))


@given(tables(), st.integers(256, 4096))
def test_what_was_staged_in_any_buckets_comes_back_from_what_the_engine_gets(
    table: tuple[dict[str, tuple[int, ...]], dict[str, str], NameMap], bucket_bytes: int
) -> None:
    shapes, dtypes, names = table
    plan = plan_manifest([(name, shape, dtypes[name]) for name, shape in shapes.items()], bucket_bytes)
    staged = tensors_in(plan, slot_memory(plan))
    for name, tensor in numbered(shapes).items():
        staged[name].copy_(tensor)
    got = names.apply(staged)
    back = {name: torch.full(shape, -1, dtype=getattr(torch, dtypes[name])) for name, shape in shapes.items()}
    for each in names.wanted:
        assert got[each.name].dtype == staged[each.parts[0].source].dtype
        rows = [one.shape[each.axis] for one in each.parts]
        for one, values in zip(each.parts, got[each.name].split(rows, each.axis), strict=True):
            back[one.source].as_strided(one.shape, one.strides, one.offset).copy_(values)
    for name, tensor in staged.items():
        assert torch.equal(back[name], tensor), name
