"""Where an engine's answer leaves plain decoding's, and whether it may."""

from collections.abc import Sequence

__all__ = ["find_parting", "is_tie"]

TIE = 0.25  # log-probabilities of bf16 logits lie on steps of up to this


def find_parting(
    want: Sequence[int], got: Sequence[int], leads: Sequence[float] = ()
) -> tuple[int, float] | None:
    """The first token of ``got`` that is not ``want``'s, and plain decoding's lead there: nan
    where it was not recorded. None where all are equal; ValueError for another length.
    """
    pairs = enumerate(zip(want, got, strict=True))
    at = next((at for at, (one, other) in pairs if one != other), None)
    if at is None:
        return None
    return at, leads[at] if at < len(leads) else float("nan")


def is_tie(lead: float) -> bool:
    """Whether another token may be as good; a lead that was not recorded is no tie."""
    return lead <= TIE
