"""Small integer functions of a node: straight-line code, or constants that kernels read."""

from collections.abc import Sequence

from bolegen.ir import Decay, TreePlan

__all__ = [
    "keeps_tree",
    "list_tables",
    "reads_tree",
    "spell_parents",
    "spell_positions",
    "spell_table",
]

_WORD = 32
_MOST_RUNS = 4


def reads_tree(plan: TreePlan) -> bool:
    """Whether kernels that ask for many nodes at once read the static tree from memory: where it
    is not regular and takes more than a word a bit, selects cost more than what they serve.
    """
    parents = plan.tree.parents or ()
    return len(parents) > _WORD and _quotient(parents) is None


def keeps_tree(plan: TreePlan) -> bool:
    """Whether a static tree is in memory: for those kernels, or where channels decay along it."""
    walked = plan.tree.is_static and plan.spec.mixer.decay is Decay.CHANNEL
    return walked or reads_tree(plan)


def list_tables(plan: TreePlan, rows: list[int]) -> list[list[int]]:
    """What is read: parents of nodes, their ``rows`` of scratch; by row, preorder number of the
    node and the last one below it.
    """
    spans = plan.spans or ()
    first, last = ([spans[node][i] for node in plan.places] for i in (0, 1))
    return [[max(parent, 0) for parent in plan.tree.parents or ()], rows, first, last]


def spell_table(values: Sequence[int]) -> list[str]:
    """Lines that return ``values[i]``, one bit of the answer at a time.

    Bit b of every value forms a plane of bits; the word of the plane that holds bit i is
    selected, shifted and masked. ``values`` are not negative. An index behind them gives any of
    their bits.
    """
    planes = max(values).bit_length()
    if planes == 0:
        return ["return i * 0"]
    lines = _shift(len(values))
    for bit in range(planes):
        lines += _word(values, bit)
        term = "((b_w >> b_s) & 1)"
        lines.append(f"b_f = {term[1:-1]}" if bit == 0 else f"b_f += {term} << {bit}")
    return [*lines, "return b_f"]


def spell_parents(parents: Sequence[int]) -> list[str]:
    """Lines that return the parent of node i > 0: a quotient where the tree is that regular."""
    width = _quotient(parents)
    if width is not None:
        return ["return i - 1" if width == 1 else f"return (i - 1) // {width}"]
    return spell_table([max(p, 0) for p in parents])


def _quotient(parents: Sequence[int]) -> int | None:
    """The w of a tree in which the parent of i is (i - 1) // w."""
    for width in range(1, len(parents)):
        if all(parents[i] == (i - 1) // width for i in range(1, len(parents))):
            return width
    return None


def spell_positions(nodes: Sequence[int], padding: int) -> list[str]:
    """Lines that return the node at padded position i, ``padding`` where there is none (-1)."""
    runs: list[tuple[int, int | None]] = []
    for position, node in enumerate(nodes):
        shift = None if node < 0 else node - position
        if not runs or runs[-1][1] != shift:
            runs.append((position, shift))
    if len(runs) > _MOST_RUNS:
        return spell_table([padding if node < 0 else node for node in nodes])
    lines = []
    for number, (start, shift) in enumerate(runs):
        value = str(padding) if shift is None else _shifted(shift)
        lines.append(
            f"o_n = {value}" if number == 0 else f"o_n = tl.where(i < {start}, o_n, {value})"
        )
    return [*lines, "return o_n"]


def _shifted(shift: int) -> str:
    if shift == 0:
        return "i"
    return f"i + {shift}" if shift > 0 else f"i - {-shift}"


def _shift(length: int) -> list[str]:
    """Lines that find where in its word bit i is.

    By selects, not ``i & 31``: LLVM's vectoriser may pair that "and" with a column index's shift,
    and the code that Triton 3.6 makes of the pair is wrong (bolegen.aot looks for it).
    """
    words = -(-length // _WORD)
    ends = range(_WORD, words * _WORD, _WORD)
    later = [f"b_s = tl.where(i < {end}, b_s, i - {end})" for end in ends]
    # padding may lie behind the last word
    return ["b_s = i", *later, f"b_s = tl.where(i < {words * _WORD}, b_s, 0)"]


def _word(values: Sequence[int], bit: int) -> list[str]:
    """Select the 32-bit word of one plane; equal neighbours share a line."""
    words = []
    for start in range(0, len(values), _WORD):
        chunk = values[start : start + _WORD]
        word = sum(((value >> bit) & 1) << i for i, value in enumerate(chunk))
        words.append(word)
    lines = [f"b_w = tl.full(i.shape, {_signed(words[0])}, tl.int32)"]
    for number in range(1, len(words)):
        if words[number] != words[number - 1]:
            bits = _signed(words[number])
            lines.append(f"b_w = tl.where(i < {number * _WORD}, b_w, {bits})")
    return lines


def _signed(word: int) -> str:
    """A 32-bit word as the int32 with the same bits; an arithmetic shift then finds each bit."""
    value = word - (1 << _WORD) if word >> (_WORD - 1) else word
    return f"{value:#X}".replace("X", "x")
