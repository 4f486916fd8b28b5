"""Integer functions spelled as code return their lists; the lines are run with numpy."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bolegen.codegen.tables import spell_parents, spell_positions, spell_table
from bolegen.ir import TreeTemplate, parse_template
from support.strategies import trees

TL = SimpleNamespace(
    full=lambda shape, value, dtype: np.full(shape, value, dtype),
    where=np.where,
    int32=np.int32,
)


def run(lines: Sequence[str], i: Any) -> Any:
    """What a kernel would get: the lines as a function of i, in 32-bit integers."""
    names: dict[str, Any] = {"tl": TL}
    exec("def f(i):\n" + "".join(f"    {line}\n" for line in lines), names)
    return names["f"](i)


def indices(count: int) -> Any:
    return np.arange(count, dtype=np.int32)


@given(st.lists(st.integers(0, 511), min_size=1, max_size=200))
def test_a_table_returns_its_values(values: list[int]) -> None:
    got = run(spell_table(values), indices(len(values)))
    assert np.array_equal(np.broadcast_to(got, len(values)), values)
    assert np.asarray(got).dtype == np.int32


@pytest.mark.parametrize("count", [1, 31, 32, 33, 64, 65, 512])
def test_a_table_of_the_sign_bit(count: int) -> None:
    # bit 31 of a word is the sign of the integer that holds it
    values = [int(i % 32 == 31) for i in range(count)]
    assert np.array_equal(run(spell_table(values), indices(count)), values)
    values = list(range(count))
    assert np.array_equal(run(spell_table(values), indices(count)), values)


@pytest.mark.parametrize("count", [2, 31, 32, 33, 40, 64, 200])
def test_no_index_shifts_a_word_by_more_than_it_has(count: int) -> None:
    """Padding lies behind the table; what LLVM makes of a longer shift is anything."""
    lines = [line for line in spell_table(list(range(count))) if line.startswith("b_s")]
    shifts = run([*lines, "return b_s"], indices(1024))
    assert shifts.min() == 0
    assert shifts.max() == 31
    assert np.array_equal(shifts[:count], indices(count) % 32)


def test_a_table_of_zeros_keeps_the_shape() -> None:
    assert np.array_equal(run(spell_table([0, 0, 0]), indices(3)), [0, 0, 0])


@given(trees(80, min_nodes=2))
def test_parents_are_spelled(tree: TreeTemplate) -> None:
    parents = tree.parents or ()
    got = run(spell_parents(parents), indices(tree.nodes))
    assert np.array_equal(np.broadcast_to(got, tree.nodes)[1:], parents[1:])


@pytest.mark.parametrize(
    ("template", "line"),
    [
        ("chain:8", "return i - 1"),
        ("(3,3,3)", "return (i - 1) // 3"),
        ("(2,2,2,2,2,2,2)", "return (i - 1) // 2"),
        ("(7)", "return (i - 1) // 7"),
        ("chain:511", "return i - 1"),
    ],
)
def test_regular_parents_need_no_table(template: str, line: str) -> None:
    assert spell_parents(parse_template(template).parents or ()) == [line]


@given(st.lists(st.integers(-1, 60), min_size=1, max_size=100))
def test_positions_are_spelled_with_padding(nodes: list[int]) -> None:
    got = run(spell_positions(nodes, 61), indices(len(nodes)))
    want = [61 if node < 0 else node for node in nodes]
    assert np.array_equal(np.broadcast_to(got, len(nodes)), want)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(0, 3))
def test_positions_in_runs(lengths: list[int], gap: int) -> None:
    nodes: list[int] = []
    for number, length in enumerate(lengths):
        nodes += range(number * 50, number * 50 + length)
        nodes += [-1] * gap
    got = run(spell_positions(nodes, 511), indices(len(nodes)))
    want = [511 if node < 0 else node for node in nodes]
    assert np.array_equal(np.broadcast_to(got, len(nodes)), want)
