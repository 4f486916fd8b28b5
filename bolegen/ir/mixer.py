"""Every recurrence, described once: oracle, proofs and templates follow from it."""

import re
from dataclasses import dataclass, replace
from enum import Enum

from bolegen.errors import SpecError

__all__ = [
    "DELTANET",
    "GDN",
    "GDN_NEG",
    "KDA",
    "KDA_BOUNDED",
    "LIGHTNING",
    "MAMBA2",
    "MIXERS",
    "Decay",
    "Mixer",
    "find_mixer",
]


class Decay(Enum):
    """What one log decay covers."""

    NONE = "none"
    CONSTANT = "constant per value head"
    SCALAR = "per token and value head"
    CHANNEL = "per token, value head and key channel"


@dataclass(frozen=True)
class Mixer:
    """A linear-attention recurrence, described by what it is; docs/add-a-mixer.md adds one.

    ``log_decay`` and ``write_gate`` are formulas of g (natural logarithm) and of beta in the
    arguments of verify; those that oracle and templates know stand in LOG_DECAYS and WRITE_GATES.
    """

    name: str
    decay: Decay
    delta: bool  # u = beta (v - S^T k), so that G is not zero; otherwise u = beta v
    log_decay: str
    write_gate: str
    convolved: bool = True  # a causal depthwise convolution with SiLU comes first
    unit_keys: bool = True  # q and k are l2-normalised, q then scaled by d_k^-1/2
    row: str = "qkv"  # order of the parts of a row
    skip: bool = False  # o gains D v, with D [Hv]

    def __post_init__(self) -> None:
        known = (
            ("log_decay", self.log_decay, LOG_DECAYS[self.decay]),
            ("write_gate", self.write_gate, WRITE_GATES),
            ("row", self.row, ROWS),
        )
        for what, value, have in known:
            if value not in have:
                raise SpecError(
                    f"mixer {self.name}: {what} {value!r} not known; have {', '.join(have)}"
                )

    @property
    def scales_state(self) -> bool:
        """Whether a path's decay is one number a value head, so that it scales the state."""
        return self.decay in (Decay.CONSTANT, Decay.SCALAR)

    @property
    def arguments(self) -> tuple[str, ...]:
        """Which of a, b, A_log and dt_bias its gates read; the others are None."""
        said = f"{self.log_decay} {self.write_gate}"
        return tuple(
            name for name in ("a", "b", "A_log", "dt_bias") if re.search(rf"\b{name}\b", said)
        )


_SOFTPLUS = "softplus(a + dt_bias)"
_GATED = f"-exp(A_log) {_SOFTPLUS}"
_BOUNDED = "-5 sigmoid(exp(A_log) (a + dt_bias))"
LOG_DECAYS = {
    Decay.NONE: ("0",),
    Decay.CONSTANT: ("-exp(A_log)",),
    Decay.SCALAR: (_GATED,),
    Decay.CHANNEL: (_GATED, _BOUNDED),
}
WRITE_GATES = ("1", "sigmoid(b)", "2 sigmoid(b)", _SOFTPLUS)
ROWS = ("qkv", "vkq")

GDN = Mixer("gdn", decay=Decay.SCALAR, delta=True, log_decay=_GATED, write_gate="sigmoid(b)")
GDN_NEG = replace(GDN, name="gdn_neg", write_gate="2 sigmoid(b)")  # negative eigenvalues
DELTANET = replace(GDN, name="deltanet", decay=Decay.NONE, log_decay="0")
KDA = replace(GDN, name="kda", decay=Decay.CHANNEL)
KDA_BOUNDED = replace(KDA, name="kda_bounded", log_decay=_BOUNDED)
MAMBA2 = Mixer(
    "mamba2",
    decay=Decay.SCALAR,
    delta=False,
    log_decay=_GATED,
    write_gate=_SOFTPLUS,
    unit_keys=False,
    row="vkq",  # x|B|C
    skip=True,
)
LIGHTNING = Mixer(
    "lightning",
    decay=Decay.CONSTANT,
    delta=False,
    log_decay="-exp(A_log)",
    write_gate="1",
    convolved=False,
    unit_keys=False,
)
_ALL = (GDN, GDN_NEG, DELTANET, KDA, KDA_BOUNDED, MAMBA2, LIGHTNING)
MIXERS = {mixer.name: mixer for mixer in _ALL}


def find_mixer(name: str) -> Mixer:
    """The mixer called ``name``; SpecError lists those there are."""
    if name not in MIXERS:
        raise SpecError(f"mixer {name!r} not supported; have {', '.join(MIXERS)}")
    return MIXERS[name]
