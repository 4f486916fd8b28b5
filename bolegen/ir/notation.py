"""Text of a template, both ways: parse_template and its inverse, spell_template."""

import json
import re
from pathlib import Path

from bolegen.errors import TreeError
from bolegen.ir.tree import MAX_NODES, TreeTemplate

__all__ = ["NOTATIONS", "parse_template", "slug", "spell_template"]

NOTATIONS = '"(3,3,3)", "chain:8", "parents:[-1,0,0,1]", "file:tree.json" or "any:64"'
_MAX_TEXT = 8192
_LONGEST_SLUG = 40  # characters; a file name has to hold it
_NUMBER = re.compile(r"[0-9]{1,9}")


def parse_template(text: str) -> TreeTemplate:
    """The template that ``text`` names; nothing in it is evaluated.

    ``(3,3,3)`` branching by level; ``chain:8`` a root and 8 below it; ``parents:[-1,0,0]``;
    ``file:tree.json`` (the list of parents, or an object with the key "parents");
    ``any:64`` topology at run time. Raises TreeError, naming the rule that is broken.
    """
    text = text.strip()
    if len(text) > _MAX_TEXT:
        raise TreeError(f"the template has {len(text)} characters; at most {_MAX_TEXT} are read")
    kind, colon, rest = text.partition(":")
    if text.startswith("(") and text.endswith(")"):
        return TreeTemplate.from_branching(_branching(text[1:-1]))
    if colon and kind == "chain":
        # chain:n has n edges, so one node more
        length = _number(rest, "chain:", MAX_NODES - 1)
        return TreeTemplate.from_parents(range(-1, length))
    if colon and kind == "any":
        return TreeTemplate.runtime(_number(rest, "any:", MAX_NODES))
    if colon and kind == "parents":
        return TreeTemplate.from_parents(_integers(_json(rest, "parents:"), "parents:"))
    if colon and kind == "file":
        return _read(Path(rest))
    raise TreeError(f"cannot read the template {_shorten(text)}; write {NOTATIONS}")


def spell_template(tree: TreeTemplate) -> str:
    """The shortest notation of ``tree``; parse_template(spell_template(tree)) == tree."""
    if tree.parents is None:
        return f"any:{tree.nodes}"
    if tree.depth == tree.nodes - 1:
        return f"chain:{tree.nodes - 1}"
    branching = _uniform_branching(tree)
    if branching:
        return f"({','.join(map(str, branching))})"
    return f"parents:[{','.join(map(str, tree.parents))}]"


def slug(tree: TreeTemplate) -> str:
    """A short name of ``tree`` that is legal in a Python identifier: 3x3x3, chain8, any64."""
    text = spell_template(tree)
    if text.startswith("parents") or len(text) > _LONGEST_SLUG:
        return f"tree{tree.nodes}_{tree.digest}"
    return text.strip("()").replace(",", "x").replace(":", "")


def _uniform_branching(tree: TreeTemplate) -> tuple[int, ...]:
    widths: list[int] = []
    for level in range(tree.depth):
        counts = {len(tree.children[n]) for n in range(tree.nodes) if tree.levels[n] == level}
        if len(counts) != 1 or 0 in counts:
            return ()
        widths.append(counts.pop())
    same = TreeTemplate.from_branching(widths)
    return tuple(widths) if same == tree else ()


def _branching(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if parts[-1] == "":
        parts.pop()
    if not parts:
        raise TreeError("the branching () is empty; a root alone is chain:0")
    if len(parts) > MAX_NODES:
        raise TreeError(f"{len(parts)} levels have more than {MAX_NODES} nodes")
    return [_number(part, "branching", MAX_NODES) for part in parts]


def _number(text: str, where: str, limit: int) -> int:
    if not _NUMBER.fullmatch(text.strip()):
        raise TreeError(f"{where} needs a whole number up to {limit}, not {_shorten(text)}")
    value = int(text)
    if value > limit:
        raise TreeError(f"{where} is {value}; a template has at most {MAX_NODES} nodes")
    return value


def _json(text: str, where: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise TreeError(f"{where} needs a list such as [-1,0,0,1], not {_shorten(text)}") from None


def _integers(value: object, where: str) -> list[int]:
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise TreeError(f"{where} needs a list of whole numbers such as [-1,0,0,1]")
    if len(value) > MAX_NODES:
        raise TreeError(f"{where} has {len(value)} entries; a template has at most {MAX_NODES}")
    return value


def _read(path: Path) -> TreeTemplate:
    where = f"file:{_shorten(str(path))}"
    try:
        if not path.is_file():
            raise TreeError(f"{where} cannot be read: there is no such plain file")
        if path.stat().st_size > 1 << 20:
            raise TreeError(f"{where} is larger than 1 MiB; 512 parents need far less")
        text = path.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise TreeError(f"{where} cannot be read: {_shorten(str(error))}") from None
    value = _json(text, where)
    if isinstance(value, dict):
        value = value.get("parents")
    return TreeTemplate.from_parents(_integers(value, where))


def _shorten(text: str) -> str:
    text = repr(text)
    return text if len(text) <= 60 else f"{text[:57]}..."
