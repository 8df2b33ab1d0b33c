"""The parameters of recurrent layers with a decay for each channel (KDA). Torch-free."""

from __future__ import annotations

from collections.abc import Iterator

from weft.kernels.delta import DeltaShape
from weft.models.parameter import Parameter, Piece, stack
from weft.models.spec import ModelSpec


def kda_parameters(spec: ModelSpec, shape: DeltaShape, rank: int | None) -> Iterator[Parameter]:
    """Yield what takes attention's place in a layer, as Kimi-Linear and Ling 3 store it.

    ``qkv`` gives q, k and v, and where gates are one product each those of the output and of
    decays. ``state_gates`` gives those of beta, and the inner numbers of others of two products.

    Args:
        rank: see ``StateSpec.gate_rank``.
    """
    hidden, heads, home = spec.hidden_size, shape.value_heads, "self_attn"
    mixed = [("q_proj", shape.keys), ("k_proj", shape.keys), ("v_proj", shape.values)]
    gates = [("b_proj", heads)]
    if rank is None:
        mixed += [("g_proj", shape.values), ("f_proj", shape.decays)]
    else:
        gates += [("g_a_proj", rank), ("f_a_proj", rank)]
    for name, parts in {"qkv": mixed, "state_gates": gates}.items():
        yield stack(name, [(f"{home}.{part}.weight", rows) for part, rows in parts], hidden)
    if rank is not None:
        yield stack("state_gate_up", [(f"{home}.g_b_proj.weight", shape.values)], rank)
        yield stack("forget_up", [(f"{home}.f_b_proj.weight", shape.decays)], rank)
    yield stack("output", [(f"{home}.o_proj.weight", hidden)], shape.values)
    taps = [(f"{home}.{part[0]}_conv1d.weight", rows) for part, rows in mixed[:3]]
    yield stack("state_conv", taps, 1, shape.taps)
    rate = (1, 1, heads, 1) if spec.layout.decay_column else (heads,)
    yield Parameter("forget_rate", rate, (Piece(f"{home}.A_log", rate),))
    yield stack("forget_bias", [(f"{home}.dt_bias", shape.decays)])
    yield stack("state_norm", [(f"{home}.o_norm.weight", shape.value_dim)])
