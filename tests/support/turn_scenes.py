"""Right calls on a checked round, to be spoiled, on any device."""
# mypy: disable-error-code="no-untyped-call"

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

from bolegen_runtime import CanonicalState, Round, SlotClaims
from support.rounds import split
from support.scene_parts import (
    LAST,
    ROWS,
    gates,
    ints,
    module,
    operands,
    tracks,
    tree,
    verified,
    weights_of,
)
from support.spoils import Scene

__all__ = ["TURN_SCENES"]


def by_round(device: str, name: str) -> Scene:
    """A checked round up to the call ``name``."""
    m, r = module(), operands(device)
    pools, claims = CanonicalState(r.state, r.conv_state), SlotClaims()
    factors = copy.deepcopy(verified(device))
    turn = Round(m, pools, factors=factors, claims=claims)

    def now() -> Any:
        sums = [(slot, row, bits) for slot, (_, row, bits) in claims._held.items()]
        return turn._waiting, turn._seen, sums, len(claims._factors)

    held = r.state, r.conv_state, factors, now
    says = ("slot", "round", "factors", "conv_weight")
    if name == "begin":
        return Scene(turn.begin, {"slots": r.slots}, held, says=says)
    turn.begin(r.slots)
    of = {"weights": weights_of(r)[0], "layer": 0, "slots": r.slots}
    if name == "verify":
        given = {"x": r.x[0], "a": r.a[0], "b": r.b[0], **of, **tree(r)}
        return Scene(turn.verify, given, held, ("out",), says=says)
    if name == "verify_qkv":
        rows = dict(zip("qkv", split(m, r.x[0]), strict=True))
        given = {**rows, **gates(r), "layer": 0, **tree(r)}
        return Scene(turn.verify_qkv, given, held, ("out",), says=says)
    turn._waiting, turn._seen = set(), ("verify", ROWS)  # as the factors say
    given = {"slots": r.slots, "last_node": ints(LAST, device=device), **tracks(device)}
    return Scene(turn.commit, given, held, says=says)


def by_claims(device: str) -> Scene:
    r, claims = operands(device), SlotClaims()
    given = {"canonical": CanonicalState(r.state, r.conv_state), "slots": r.slots}

    def call(**of: Any) -> None:
        claims.take("a round", factors=claims, **of)

    return Scene(call, given, (claims._held,), says=("slot",))


TURN_SCENES: dict[str, Callable[[str], Scene]] = {
    "begin": partial(by_round, name="begin"), "Round.verify": partial(by_round, name="verify"),
    "Round.verify_qkv": partial(by_round, name="verify_qkv"),
    "Round.commit": partial(by_round, name="commit"), "take": by_claims,
}  # fmt: skip
