"""mixer -> what the templates spell of it: places in a row, gates, scales, arguments."""

from textwrap import wrap
from types import SimpleNamespace

from bolegen.codegen.buffers import decay_planes
from bolegen.ir import Decay, LayerSpec, Mixer, TreePlan

__all__ = ["spell_mixer"]

_BETA = {
    "1": None,
    "sigmoid(b)": "_sigmoid(b_b)",
    "2 sigmoid(b)": "2.0 * _sigmoid(b_b)",
    "softplus(a + dt_bias)": "_softplus(b_x)",
}


def spell_mixer(plan: TreePlan) -> dict[str, object]:
    """Flags of the mixer, and the expressions that follow from it."""
    spec, mixer, replay = plan.spec, plan.spec.mixer, plan.spec.factors == "replay"
    decays, gated = mixer.scales_state, mixer.write_gate != "1"
    planes, channel = decay_planes(plan), mixer.decay is Decay.CHANNEL
    per_token = mixer.decay in (Decay.SCALAR, Decay.CHANNEL)
    fetched = ["b_e" if channel else "g"] * per_token + ["beta"] * gated
    words = ["decays" if channel else "log decay"] * per_token + ["write gate"] * gated
    return {
        "mixer": mixer.name,
        "mixer_line": _describe(mixer),
        "gates_line": _describe_gates(mixer),
        "row": "|".join(mixer.row),
        "delta": mixer.delta,
        "unit": mixer.unit_keys,
        "convolved": mixer.convolved,
        "skip": mixer.skip,
        "decays": decays,
        "per_token": mixer.decay is Decay.SCALAR,
        "constant": mixer.decay is Decay.CONSTANT,
        "channel": channel,
        "gated": gated,
        "log_decay": mixer.log_decay,
        "write_gate": mixer.write_gate,
        "beta": _BETA[mixer.write_gate],
        "arguments": mixer.arguments,
        "a_dims": spec.gate_dims("a"),
        "b_dims": spec.gate_dims("b"),
        # log decays of channels are formed by programs of their own
        "gate_arguments": tuple(n for n in mixer.arguments if n == "b" or not channel),
        "gram_more": ", p_rates, p_reach, parents" if channel else "",
        "gates": spec.gates,
        "keeps_rows": spec.keeps_rows,
        "gates_width": "2 * HV" if spec.gates == 2 else "HV",
        "planes": f"{len(planes)} * HV" if len(planes) > 1 else "HV" * len(planes),
        "plane": lambda name: _shift(planes.index(name)),
        "fetched": "".join(f", {name}" for name in fetched),
        "fetched_words": "".join(f"{',' if w != words[-1] else ' and'} {w}" for w in words),
        "at": _places(spec),
        **_scales(mixer, decays, gated),
        **_arguments(spec),
        "node_wise": _join(
            ["convolution"] * mixer.convolved
            + ["norms"] * mixer.unit_keys
            + ["gates"] * (gated or decays)
            + ["decays of channels"] * channel
            + ["path sums of log decays"] * (mixer.decay not in (Decay.NONE, Decay.CHANNEL))
        ),
        "closed_form": _closed_form(mixer),
        "folded": _folded(mixer, replay),
        "solve_of": _solve_of(mixer, replay),
    }


def _describe(mixer: Mixer) -> str:
    """What sets it apart but for its gates, in a line."""
    said = ["delta term"] * mixer.delta + ["unit keys"] * mixer.unit_keys
    said += ["convolution"] * mixer.convolved + ["skip D v"] * mixer.skip
    return ", ".join([*said, f"rows {'|'.join(mixer.row)}"])


def _describe_gates(mixer: Mixer) -> str:
    each = " a key channel" if mixer.decay is Decay.CHANNEL else ""
    return f"g = {mixer.log_decay}{each}; beta = {mixer.write_gate}"


def _shift(plane: int) -> str:
    return ("", " + HV * T", " + 2 * HV * T")[plane]


def _join(words: list[str]) -> str:
    return " and ".join([*([", ".join(words[:-1])] if words[1:] else []), words[-1]])


def _places(spec: LayerSpec) -> SimpleNamespace:
    """Where q, k and v stand in a row, as kernels and the caller's views spell it."""
    keys, values = spec.key_heads * spec.d_k, spec.value_heads * spec.d_v
    if spec.mixer.row == "qkv":
        starts = {"q": 0, "k": keys, "v": 2 * keys}
        kernel = {
            "lower": "", "query": "", "first": "p_q", "second": "p_k", "pair": "(1 - o_c % 2)",
            "key_head": "i_r * DK", "is_q": "c < HK * DK", "is_k": "c >= HK * DK",
            "k": "HK * DK", "v": "2 * HK * DK", "kept_key": "(HK + i_k) * DK",
        }  # fmt: skip
    else:
        starts = {"v": 0, "k": values, "q": values + keys}
        kernel = {
            "lower": "HV * DV + ", "query": "HV * DV + HK * DK + ", "first": "p_k",
            "second": "p_q", "pair": "(o_c % 2)",
            "key_head": "(i_r + HK) % (2 * HK) * DK + HV * DV",
            "is_q": "c >= HV * DV + HK * DK", "is_k": "c < HV * DV + HK * DK",
            "k": "HV * DV", "v": "", "kept_key": "i_k * DK + HV * DV",
        }  # fmt: skip
    views = {f"x_{name}": f"x[..., {at}:]" if at else "x" for name, at in starts.items()}
    return SimpleNamespace(**kernel, **views)


def _scales(mixer: Mixer, decays: bool, gated: bool) -> dict[str, str]:
    """Scales of a node: of R's state product and of Q S, empty where they are 1."""
    write = ["b_beta"] * gated + ["b_rk"] * mixer.unit_keys
    gate = f"({' * '.join(write)})" if len(write) == 2 and decays else " * ".join(write)
    sums = ["b_p"] * decays
    return {
        "gate_scale": " * ".join([*sums, gate] if gate else sums),
        "query_scale": " * ".join(sums + ["b_rq"] * mixer.unit_keys),
        "scales_of": ", ".join(
            ["beta"] * gated
            + [f"beta{' P' * decays}{' / |k|' * mixer.unit_keys}"] * mixer.delta
            + [f"{'P ' * decays}scale / |q|" if mixer.unit_keys else "P"]
        )
        + " and q.k",
    }


def _arguments(spec: LayerSpec) -> dict[str, object]:
    """Checks of the gates' operands, and the lines that describe the arguments of verify."""
    mixer, have = spec.mixer, spec.mixer.arguments
    nodes: list[str] = [name for name in ("a", "b") if name in have]
    heads: list[str] = [name for name in ("A_log", "dt_bias") if name in have]
    unused = [name for name in ("a", "b", "A_log", "dt_bias") if name not in have]
    if mixer.decay is Decay.CHANNEL:
        nodes.remove("a")
        heads.remove("dt_bias")
    pairs = ", ".join
    return {
        "gate_checks": pairs(f'("{name}", {name})' for name in nodes) + ("," * (len(nodes) == 1)),
        "head_checks": pairs(f'("{name}", {name})' for name in heads) + ("," * (len(heads) == 1)),
        "unused_arguments": pairs(f"{name}={name}" for name in unused),
        "operand_lines": wrap("  ".join(_operands(mixer, nodes, heads, unused)), 95),
    }


def _operands(mixer: Mixer, nodes: list[str], heads: list[str], unused: list[str]) -> list[str]:
    """What verify takes, a sentence each."""
    rows = f"{'pre-convolution ' * mixer.convolved}rows {'|'.join(mixer.row)}"
    said = [f"x [B, T, C]: {rows}, unit last stride."]
    if mixer.decay is Decay.CHANNEL:
        said.append("a [B, T, Hv, dk], unit last stride.")
    if nodes:
        said.append(f"{', '.join(nodes)} [B, T, Hv], any strides.")
    if mixer.convolved:
        said.append("conv_weight [C, W], conv_bias [C] or None.")
    if heads:
        said.append(f"{', '.join(heads)} [Hv].")
    if mixer.decay is Decay.CHANNEL:
        said.append("dt_bias [Hv, dk].")
    if mixer.skip:
        said.append("D [Hv] or None.")
    if mixer.convolved:
        said.append("state [slots, Hv, dv, dk] and conv_state [slots, C, W-1] (oldest first)")
        said[-1] += " are only read."
    else:
        said.append("state [slots, Hv, dv, dk] is only read.")
        unused = [*unused, "conv_weight", "conv_bias", "conv_state"]
    said.append("slots [B], negative = padded row.")
    return [*said, f"{', '.join(unused)}: None."] if unused else said


def _closed_form(mixer: Mixer) -> str:
    if mixer.delta:
        solved = f"(I + G) U = R,  R = D_beta (V - {_reached(mixer, 'K')}),  G nilpotent."
        return f"O = {_reached(mixer, 'Q')} + C U,  {solved}"
    alone = "there is no delta term, so that G = 0."
    return f"O = {_reached(mixer, 'Q')} + C U{_skipped(mixer)},  U = {_written(mixer)}: {alone}"


def _folded(mixer: Mixer, replay: bool) -> str:
    """What factor leaves to solve, in a line."""
    o = f"solve has O = {_reached(mixer, 'Q')} + Y R"
    if mixer.delta:
        u = "" if replay else ", U = R + Z R"
        return f"Factor folds (I + G)^-1 into Y = C (I + G)^-1: {o}{u}."
    return f"Nothing is to be solved, so Y = C and U = R: {o}{_skipped(mixer)}."


def _solve_of(mixer: Mixer, replay: bool) -> str:
    o = f"O = {_reached(mixer, 'Q')} + Y R"
    if mixer.delta:
        return f"R from state products, then {o}{'' if replay else ', U = R + Z R'}"
    return f"{o}{_skipped(mixer)}, R = {_written(mixer)}{'' if replay else ' = U'}"


def _reached(mixer: Mixer, rows: str) -> str:
    """The state's part for rows K or Q; o is the product channel by channel."""
    if mixer.decay is Decay.CHANNEL:
        return f"(P o {rows}) S"
    return f"D_P {rows} S" if mixer.scales_state else f"{rows} S"


def _written(mixer: Mixer) -> str:
    return "V" if mixer.write_gate == "1" else "D_beta V"


def _skipped(mixer: Mixer) -> str:
    return " + D V" if mixer.skip else ""
