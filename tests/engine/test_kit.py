"""What the kit's driver brings of its own: links and the convolution of its reference."""

import pytest
import torch
from torch.nn import functional

from benchmarks.engine.kit_cases import CASES, Case
from benchmarks.engine.kit_parts import Run
from support.trees import links_of


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name} {case.graph}")
def test_links_and_depth_are_those_of_the_parents(case: Case) -> None:
    parents = list(case.parents)
    assert all(-1 <= parent < node for node, parent in enumerate(parents))
    assert case.links() == links_of(parents)
    paths = [0]
    for parent in parents[1:]:
        paths.append(paths[parent] + 1)
    assert case.depth == max(paths)


def test_the_reference_convolves_each_path_from_its_request_s_window() -> None:
    case = Case("two requests", (-1, 0, 0, 1), prefix=(2, 3))
    rows, taps, windows = torch.randn(8, 5), torch.randn(5, 2), torch.randn(3, 5)
    got = Run(case, case.parents, 0.0, taps, windows).convolve(rows).view(2, 4, 5)
    for request, x in enumerate(rows.view(2, 4, 5)):
        for node, parent in enumerate(case.parents):
            before = windows[request] if parent < 0 else x[parent]
            want = functional.silu(before * taps[:, 0] + x[node] * taps[:, 1])
            torch.testing.assert_close(got[request, node], want)
