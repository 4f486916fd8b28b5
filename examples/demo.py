"""``python -m examples.demo``: one tree through every stage, on the CPU."""

import os
import sys

__all__ = ["main"]

TEMPLATE, DEPTH = "(3,3,3)", 8


def main() -> int:
    """Show the tree, compile it, prove it, run it and commit a path; 0 when all agrees."""
    # read by Triton when it is imported
    os.environ["TRITON_INTERPRET"] = "1"
    import numpy as np
    import torch

    from bolegen import oracle
    from bolegen.codegen import compile_plan, plan_template
    from bolegen.ir import LayerSpec, parse_template, show_tree
    from bolegen.proofs import prove_plan
    from bolegen_runtime import load

    print(f"1. The draft tree {TEMPLATE}\n")
    print(show_tree(parse_template(TEMPLATE)))

    print(f'2. bolegen compile --template "{TEMPLATE}" --depth {DEPTH}, pass by pass\n')
    spec = LayerSpec(key_heads=1, value_heads=2, d_k=32, d_v=32)
    plan = plan_template(
        TEMPLATE,
        spec,
        depth=DEPTH,
        on_pass=lambda name, p: print(
            f"   {name:17} {p.steps} products with G, {len(p.blocks)} blocks, "
            f"{p.column_count} columns, value tile {p.tiling.b_v}"
        ),
    )
    module = compile_plan(plan)
    lines = len(module.text.splitlines())
    print(f"   {module.name}.py: {lines} lines of Triton, digest {module.digest}\n")

    print("3. The proof\n")
    print(prove_plan(plan), "\n")

    print("4. verify and commit, in Triton's interpreter, beside the recurrence in float64\n")
    m = load(TEMPLATE, depth=DEPTH, heads=(1, 2), dims=(32, 32))
    torch.manual_seed(0)
    channels, nodes, slot, last = spec.channels, plan.tree.nodes, 1, 30
    x = torch.randn(1, nodes, channels).to(torch.bfloat16)
    a, b = (torch.randn(1, nodes, 2).to(torch.bfloat16) for _ in range(2))
    weight = torch.randn(channels, 4).to(torch.bfloat16)
    rate, bias = torch.rand(2), torch.randn(2)
    state = torch.randn(1, 3, 2, 32, 32)
    window = torch.randn(1, 3, channels, 3).to(torch.bfloat16)
    slots = torch.tensor([slot])

    factors = m.allocate(batch=1, layers=1, device="cpu")
    before = state.clone()
    out = m.verify(x, a, b, weight, rate, bias, state[0], window[0], slots, factors)

    def wide(t: torch.Tensor) -> oracle.Array:
        array: oracle.Array = t.double().numpy()
        return array

    want = oracle.verify(
        plan.tree.parents or (),
        wide(x[0]),
        wide(a[0]),
        wide(b[0]),
        wide(weight),
        wide(rate),
        wide(bias),
        wide(before[0, slot]),
        wide(window[0, slot]),
        key_heads=1,
        round_rows=lambda rows: wide(torch.from_numpy(rows).bfloat16()),
        keep_states=True,
    )
    assert want.states is not None
    m.commit(factors, state, window, slots, torch.tensor([last]))

    def error(got: torch.Tensor, exact: oracle.Array) -> float:
        return float(np.linalg.norm(wide(got) - exact) / np.linalg.norm(exact))

    errors = error(out[0], want.o), error(state[0, slot], want.states[last])
    untouched = torch.equal(state[0, [0, 2]], before[0, [0, 2]])
    print(f"   outputs of {nodes} nodes      relative error {errors[0]:.1e} (bf16 rounds at 2e-3)")
    print(f"   state after node {last}      relative error {errors[1]:.1e}")
    print(f"   other slots untouched    {untouched}")
    ratio = spec.snapshot_bytes / spec.factor_bytes
    print(
        f"   kept for each node       {spec.factor_bytes} bytes, a snapshot takes {ratio:.0f}x\n"
    )
    return 0 if errors[0] < 4e-3 and errors[1] < 2e-5 and untouched else 1


if __name__ == "__main__":
    sys.exit(main())
