"""A server's rounds on the plugin's hooks: pools, links, slots and nodes as SGLang hands them."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

from bolegen_runtime.sglang import hooks
from support.rounds import Round, make_round
from support.sglang_fakes import make_params
from support.trees import links_of

__all__ = ["CHAIN", "DIMS", "HEADS", "NODES", "Server", "bounds_flags", "chain_flags"]

HEADS, DIMS, NODES, DEPTH = (1, 2), (16, 16), 6, 3
# a node with two children, a chain to the full depth, an orphan: its parent was not chosen
TREE = [-1, 0, 0, 1, 3, 9]
STAR = [-1, 0, 0, 0, 0, 0]
CHAIN = list(range(-1, NODES - 1))


def bounds_flags() -> dict[str, Any]:
    """Flags of a server that verifies such trees."""
    return {
        "speculative_algorithm": "EAGLE",
        "speculative_eagle_topk": 2,
        "speculative_num_steps": DEPTH,
        "speculative_num_draft_tokens": NODES,
    }


def chain_flags() -> dict[str, Any]:
    """Flags of a server that verifies chains of as many nodes."""
    return bounds_flags() | {"speculative_eagle_topk": 1, "speculative_num_steps": NODES - 1}


@dataclass
class Server:
    """One target model: its pool, its GDN layers, and the metadata of the current forward.

    layer_ids are the model's own numbers. ``data`` holds weights and one round of rows.
    """

    pool: Any
    req_pool: Any
    linear: Any
    attention: Any
    layer_ids: list[int]
    data: Round

    @classmethod
    def start(
        cls,
        backends: tuple[Any, Any],
        pool_class: Any,
        configurator: Any,
        *,
        rows: int = 3,
        **params: Any,
    ) -> "Server":
        """Size the pool and build it, as a model runner does."""
        layer_ids = [0, 2]
        configurator.mambaish_config = SimpleNamespace(
            mamba2_cache_params=make_params(HEADS, DIMS, len(layer_ids), **params)
        )
        configurator.model_config = SimpleNamespace(dtype=torch.bfloat16)
        hooks.size(lambda *_: None, configurator, 1.0)
        pool = pool_class(
            size=7,
            spec_state_size=rows,
            cache_params=configurator.mambaish_config.mamba2_cache_params,
            mamba_layer_ids=layer_ids,
            device="cpu",
            speculative_num_draft_tokens=NODES,
        )
        req_pool = SimpleNamespace(
            mamba_pool=pool,
            mamba_map={layer: i for i, layer in enumerate(layer_ids)},
            mamba2_layer_cache=lambda layer: pool.mamba_cache.at_layer_idx(layer_ids.index(layer)),
        )
        linear, attention = (made.__new__(made) for made in backends)
        linear.req_to_token_pool, attention.linear_attn_backend = req_pool, linear
        verifier = pool.bolegen_verifiers[NODES]
        trees = None if verifier.spec.bounds.chain else [TREE] * rows
        data = make_round(
            verifier.module, batch=rows, layers=2, slots=8, trees=trees, log_rate=(-4, 0)
        )
        pool.mamba_cache.temporal.copy_(data.state)
        pool.mamba_cache.conv[0].copy_(data.conv_state)
        return cls(pool, req_pool, linear, attention, layer_ids, data)

    def plan(self, trees: list[list[int]], slots: list[int], dtype: torch.dtype) -> None:
        """The forward's metadata: int64 in eager mode, int32 buffers in a graph; chains have no
        links.
        """
        first, sibling = zip(*map(links_of_orphans, trees), strict=True)
        chains = all(tree == CHAIN for tree in trees)
        self.linear.forward_metadata = SimpleNamespace(
            retrieve_next_token=None if chains else torch.tensor(first, dtype=dtype),
            retrieve_next_sibling=None if chains else torch.tensor(sibling, dtype=dtype),
            mamba_cache_indices=torch.tensor(slots, dtype=torch.int32),
        )

    def forward(self, rows: int, *, wide: int = 0, nodes: int = NODES) -> list[torch.Tensor]:
        """Verify every layer, the first ``nodes`` of each request; ``wide``: the projection's
        other columns beside the rows'.
        """
        out = []
        for i, layer_id in enumerate(self.layer_ids):
            d = self.data
            layer = SimpleNamespace(
                layer_id=layer_id, conv_weights=d.conv_weight[i], bias=None, activation="silu",
                A_log=d.A_log[i], dt_bias=d.dt_bias[i], num_v_heads=HEADS[1], head_v_dim=DIMS[1],
            )  # fmt: skip
            x = d.x[i, :rows, :nodes].flatten(0, 1)
            beside = torch.full((len(x), wide), float("nan"), dtype=x.dtype)
            x = torch.cat([x, beside], 1)[:, : x.shape[1]]
            gates = torch.cat([d.b[i, :rows, :nodes], d.a[i, :rows, :nodes]], 2).flatten(0, 1)
            out.append(
                self.linear.forward_extend(
                    q=None, k=None, v=None, layer=layer, save_kv_cache=True,
                    forward_batch=batch_of(target_verify=True), mixed_qkv=x,
                    a=gates[:, HEADS[1] :], b=gates[:, : HEADS[1]],
                )
            )  # fmt: skip
        return out

    def direct(self, trees: list[list[int]], slots: list[int]) -> Round:
        """The same round for the module itself, on pools of its own."""
        pools = self.pool.mamba_cache
        rows, nodes = len(trees), len(trees[0])
        live = torch.tensor([[p < nodes for p in tree] for tree in trees])
        parents = torch.tensor([[p if p < nodes else -1 for p in tree] for tree in trees])
        d = self.data.with_clones()
        return replace(
            d, x=d.x[:, :rows, :nodes], a=d.a[:, :rows, :nodes], b=d.b[:, :rows, :nodes],
            slots=torch.tensor(slots),
            state=pools.temporal.clone(), conv_state=pools.conv[0].clone(),
            parents=None if d.parents is None else parents, live=live,
        )  # fmt: skip


def batch_of(*, target_verify: bool) -> Any:
    """What a forward batch says of itself."""
    mode = SimpleNamespace(is_target_verify=lambda: target_verify)
    return SimpleNamespace(forward_mode=mode)


def links_of_orphans(parents: list[int]) -> tuple[list[int], list[int]]:
    """Links of the nodes whose parent is there; the orphans come last."""
    linked = max((i for i, parent in enumerate(parents) if parent < len(parents)), default=0)
    first, sibling = links_of(parents[: linked + 1])
    missing = [-1] * (len(parents) - len(first))
    return first + missing, sibling + missing
