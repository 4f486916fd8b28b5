"""What is compiled for: the mixer, its shapes and dtypes, the contract, the target."""

from dataclasses import dataclass
from enum import Enum
from math import prod

from bolegen.errors import SpecError
from bolegen.ir.mixer import GDN, Decay, Mixer

__all__ = [
    "CONTRACTS",
    "FACTOR_LAYOUTS",
    "PORTABLE_SMEM",
    "READOUTS",
    "TARGETS",
    "DType",
    "LayerSpec",
    "Target",
    "find_target",
]


class DType(Enum):
    """A storage type; the value is how users spell it."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"

    @property
    def bytes(self) -> int:
        """Size of one element, in bytes."""
        return 4 if self is DType.FP32 else 2

    @property
    def torch(self) -> str:
        """Name in torch and in triton.language: bfloat16, float16, float32."""
        return {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[self.value]

    @property
    def pointer(self) -> str:
        """Triton's signature of a pointer to it: *bf16."""
        return f"*{self.value}"


FACTOR_LAYOUTS = ("replay", "pku")
CONTRACTS = ("fp32", "tf32")
READOUTS = ("split", "bf16")


@dataclass(frozen=True)
class LayerSpec:
    """One recurrent layer: Hk key heads, Hv value heads, state [Hv, d_v, d_k].

    ``readout``: Y and R meet in O in two bf16 terms each (split), or rounded to bf16 (bf16).
    Raises SpecError for shapes outside the contract: head ratio whole, dims multiples of 8
    from 16, d_k to 256, d_v to 512, convolution width 2 to 4, a bf16 readout of bf16 rows only.
    ``conv`` is 1, a node's own row, where the mixer has no convolution.
    """

    mixer: Mixer = GDN
    key_heads: int = 16
    value_heads: int = 32
    d_k: int = 128
    d_v: int = 128
    conv: int = 4
    dtype: DType = DType.BF16
    state_dtype: DType = DType.FP32
    factors: str = "replay"
    contract: str = "fp32"
    readout: str = "split"

    def __post_init__(self) -> None:
        if self.key_heads < 1 or self.value_heads < 1 or self.value_heads > 1024:
            raise SpecError(
                f"heads {self.key_heads}:{self.value_heads} must be at least 1:1 "
                "and at most 1024 value heads"
            )
        if self.value_heads % self.key_heads:
            raise SpecError(
                f"heads {self.key_heads}:{self.value_heads}: value heads must be a multiple of "
                "key heads, since value head h uses key head h // (Hv / Hk)"
            )
        for name, value, limit in (("dk", self.d_k, 256), ("dv", self.d_v, 512)):
            if value % 8 or not 16 <= value <= limit:
                raise SpecError(
                    f"{name}={value} not supported; dims are multiples of 8 from 16, "
                    f"{name} to {limit}"
                )
        if not self.mixer.convolved:
            object.__setattr__(self, "conv", 1)
        elif not 2 <= self.conv <= 4:
            raise SpecError(f"convolution width {self.conv} not supported; have 2, 3, 4")
        if self.state_dtype is DType.FP16:
            raise SpecError("state dtype fp16 not supported; have fp32, bf16")
        if self.factors not in FACTOR_LAYOUTS:
            raise SpecError(
                f"factors {self.factors!r} not known; have {', '.join(FACTOR_LAYOUTS)}"
            )
        if self.contract not in CONTRACTS:
            raise SpecError(f"contract {self.contract!r} not known; have {', '.join(CONTRACTS)}")
        if self.readout not in READOUTS:
            raise SpecError(f"readout {self.readout!r} not known; have {', '.join(READOUTS)}")
        if self.readout == "bf16" and self.dtype is not DType.BF16:
            raise SpecError(
                f"readout bf16 is for outputs rounded to bf16, not to {self.dtype.value}; "
                "use readout split"
            )

    @property
    def ratio(self) -> int:
        """Value heads that share one key head."""
        return self.value_heads // self.key_heads

    @property
    def channels(self) -> int:
        """C = 2 Hk d_k + Hv d_v, the width of a row, in whichever order its parts are."""
        return 2 * self.key_heads * self.d_k + self.value_heads * self.d_v

    @property
    def snapshot_bytes(self) -> int:
        """What an engine stores per node and layer: a state as its pool has it, and a window."""
        window = self.channels * (self.conv - 1) * self.dtype.bytes
        return self.value_heads * self.d_k * self.d_v * self.state_dtype.bytes + window

    @property
    def row_bytes(self) -> int:
        """One row q|k|v, as verify is given it."""
        return self.channels * self.dtype.bytes

    @property
    def gates(self) -> int:
        """Float32 gates that a node and value head keep until acceptance, channels apart."""
        log_decay = self.mixer.decay is Decay.SCALAR
        return log_decay + (self.factors == "replay" and self.mixer.write_gate != "1")

    def gate_dims(self, name: str) -> tuple[int, ...] | None:
        """Axes of a or b behind batch and node; None where the mixer does not read it."""
        if name not in self.mixer.arguments:
            return None
        by_channel = name == "a" and self.mixer.decay is Decay.CHANNEL
        return (self.value_heads, self.d_k) if by_channel else (self.value_heads,)

    @property
    def operands(self) -> int:
        """Elements of a and b that verify takes a node."""
        return sum(prod(dims) for dims in map(self.gate_dims, "ab") if dims is not None)

    @property
    def keeps_rows(self) -> bool:
        """Whether rows live until acceptance: to replay from, or for the convolution's window."""
        return self.factors == "replay" or self.mixer.convolved

    @property
    def factor_bytes(self) -> int:
        """Factors per node and layer, raw row included (docs/theory.md)."""
        heads = self.gates * self.value_heads
        if self.factors == "pku":
            heads += self.key_heads * self.d_k + self.value_heads * self.d_v
        if self.mixer.decay is Decay.CHANNEL:
            heads += self.value_heads * self.d_k
        return self.keeps_rows * self.row_bytes + heads * 4


@dataclass(frozen=True)
class Target:
    """A GPU architecture: what the ahead-of-time build and the tiling need to know."""

    name: str
    backend: str  # Triton's backend
    arch: int | str
    warp: int  # threads
    smem_bytes: int  # shared memory that one program can have

    @property
    def overlaps(self) -> bool:
        """Whether a kernel may start before the one that it waits for has ended."""
        return isinstance(self.arch, int) and self.arch >= 90


TARGETS = {
    target.name: target
    for target in (
        Target("sm_80", "cuda", 80, 32, 166_912),
        Target("sm_90", "cuda", 90, 32, 232_448),
        Target("sm_100", "cuda", 100, 32, 232_448),
        Target("sm_120", "cuda", 120, 32, 101_376),
        Target("gfx942", "hip", "gfx942", 64, 65_536),
    )
}
PORTABLE_SMEM = min(target.smem_bytes for target in TARGETS.values())


def find_target(name: str) -> Target:
    """The target called ``name``; SpecError lists those there are."""
    if name not in TARGETS:
        raise SpecError(f"target {name!r} not known; have {', '.join(TARGETS)}")
    return TARGETS[name]
