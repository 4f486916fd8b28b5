"""What stands in for parts of SGLang's attention test kit while one of its GDN cases runs."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional

from benchmarks.engine.kit_cases import Case
from bolegen_runtime.sglang import hooks, layers

__all__ = ["Run", "change_kit"]


@dataclass
class Run:
    """A case in progress: what stands in for parts of the kit, and what passed through them."""

    case: Case
    parents: tuple[int, ...]
    tolerance: float
    taps: Any = None  # [C, W]
    windows: Any = None  # [requests, C], W = 2
    graph: Any = None
    wanted: Any = None  # [1, R * N, Hv, d_v]
    got: Any = None
    mistakes: dict[str, bool] = field(default_factory=dict)

    def convolve(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [R * N, C] -> the same behind the convolution along paths, and SiLU."""
        if self.taps is None:
            return rows
        x = rows.view(-1, len(self.parents), rows.shape[1]).float()
        before = torch.cat([x, self.windows[: len(x), None].float()], 1)[:, list(self.parents)]
        mixed = before * self.taps[:, 0].float() + x * self.taps[:, 1].float()
        return functional.silu(mixed).to(rows.dtype).view_as(rows)

    def real(self, out: torch.Tensor) -> torch.Tensor:
        """Outputs [1, R * N, Hv, d_v] of the requests, padded rows left out."""
        return out[:, : len(self.case.prefix) * len(self.parents)]

    def expect(self, original: Any, *args: Any, **options: Any) -> Any:
        """The kit's reference; and whether zeros, or the tree as a chain, would pass for it."""
        self.wanted = self.real(original(*args, **options))
        self.parents, kept = tuple(range(-1, len(self.parents) - 1)), self.parents
        chain = self.real(original(*args, **options))
        self.parents = kept
        atol = self.tolerance
        for name, wrong in (("zeros", torch.zeros_like(chain)), ("chain", chain)):
            self.mistakes[name] = torch.allclose(wrong, self.wanted, atol=atol, rtol=3e-2)
        return self.wanted

    def forward(self, original: Any, fixture: Any, batch: Any, inputs: Any) -> torch.Tensor:
        """As it is; in a graph case captured by the first call and replayed by the second."""
        if not self.case.graph or fixture.runner.device == "cpu":
            self.got = original(fixture, batch, inputs)
        elif self.graph is None:
            original(fixture, batch, inputs)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.got = original(fixture, batch, inputs)
            self.graph = graph, inputs
        else:
            graph, held = self.graph
            for name, rows in inputs.items():
                held[name].copy_(rows)
            self.got.fill_(float("nan"))
            graph.replay()
        return self.real(self.got)


@contextmanager
def change_kit(run: Run, gdn: Any, runner: Any) -> Iterator[None]:
    """Replace names in the kit's two modules, each only where the case is not as SGLang has it."""
    expected, forward = runner.expected_gdn_verify_output_from_inputs, runner.run_gdn_forward
    new: dict[str, Any] = {
        expected.__name__: lambda *a, **kw: run.expect(expected, *a, **kw),
        forward.__name__: lambda *a: run.forward(forward, *a),
    }
    in_gdn: dict[str, Any] = {
        "_gdn_verify_parent_indices": lambda nodes, topk: run.parents,
        "HybridReqToTokenPool": sized(gdn.HybridReqToTokenPool),
    }
    if run.case.plan != "kit":
        in_gdn["GDNAttnBackend"] = told(gdn.GDNAttnBackend, run.case.topk)
    if run.case.plan == "tree":
        in_gdn |= make_layers(run, gdn)
        new |= {
            "build_gdn_attention_fixture": filled(run, gdn),
            "_make_retrieve_tensors": lambda made, *, topk, device: link(run.case, made, device),
            # of full attention, which has no layer here
            "_draft_tree_mask": lambda *, draft_token_num, topk, device: torch.ones(
                draft_token_num, draft_token_num, dtype=torch.bool, device=device
            ),
            "GDN_TREE_ATOL": run.tolerance,
            "SpeculativeCudaGraphAdapter": padded(gdn, runner.SpeculativeCudaGraphAdapter),
        }
    with ExitStack() as stack:
        for module, names in ((runner, new), (gdn, in_gdn)):
            stack.enter_context(patch.multiple(module, **names))
        yield


def sized(original: Any) -> Any:
    """The pool, after what sizing would have told the plugin of it."""

    def build(**options: Any) -> Any:
        bounds, params = hooks.active.bounds, options["cache_params"]
        if bounds is not None:
            count = len(options["mamba_layer_ids"])
            hooks.active.specs = tuple(
                layers.read_spec(b, params, count, params.dtype.conv) for b in bounds
            )
        return original(**options)

    return build


def told(original: Any, topk: int) -> Any:
    """The backend with the case's topk, in place of the 1 that the kit publishes."""

    def build(runner: Any) -> Any:
        made = original(runner)
        made.topk = topk
        return made

    return build


def make_layers(run: Run, gdn: Any) -> dict[str, Any]:
    """The kit's layer and its reference with random taps and SiLU."""

    class Layer(gdn.ProjectedGDNAttention):  # type: ignore[misc]
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.attn.activation = "silu"
            self.attn.conv_weights.normal_()
            run.taps = self.attn.conv_weights

    class Reference(gdn.ReferenceGDNAttention):  # type: ignore[misc]
        def split_qkv(self, rows: torch.Tensor) -> Any:
            return super().split_qkv(run.convolve(rows))

    return {"ProjectedGDNAttention": Layer, "ReferenceGDNAttention": Reference}


def filled(run: Run, gdn: Any) -> Any:
    """The kit's fixture with convolution windows that are not zero; request r is in slot r + 1."""

    def build(*args: Any, **options: Any) -> Any:
        fixture = gdn.build_gdn_attention_fixture(*args, **options)
        windows = gdn._conv_states(fixture)
        windows.normal_()
        run.windows = windows[1:, :, 0].clone()
        return fixture

    return build


def link(case: Case, made: Any, device: str) -> tuple[torch.Tensor, ...]:
    """Node numbers, first children and next siblings [R, N]."""
    rows = torch.tensor([list(range(len(case.parents))), *case.links()], device=device)
    return tuple(row.repeat(made.batch_size, 1) for row in rows)


def padded(gdn: Any, original: Any) -> Any:
    """The kit's adapter with rows beyond the requests; SGLang gives them slot -1 at replay."""

    def rows(made: Any, fixture: Any, _: Any, inputs: Any, **options: Any) -> Any:
        count = made.num_input_tokens
        return gdn.make_gdn_token_padded_inputs(made, fixture, count, inputs, **options)

    def build(**options: Any) -> Any:
        return replace(
            original(**options),
            allow_padding=True,
            make_replay_case=lambda base, name, spare: gdn.make_gdn_case_with_prefix_lens(
                base, name, base.prefix_lens + spare
            ),
            make_replay_inputs=rows,
        )

    return build
