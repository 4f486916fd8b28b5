"""Which flags give trees, which pass through, and which are refused by name."""

from typing import Any

import pytest

from bolegen_runtime.sglang import RELEASES, PluginError, find_release
from bolegen_runtime.sglang.flags import SERVED, TreeBounds, read_bounds
from bolegen_runtime.sglang.versions import write_matrix
from repo.sources import ROOT

TREES: dict[str, Any] = {
    "speculative_algorithm": "EAGLE",
    "speculative_eagle_topk": 3,
    "speculative_num_steps": 4,
    "speculative_num_draft_tokens": 16,
    "device": "cuda",
    "disaggregation_mode": "null",
    "pp_size": 1,
}


def test_a_tree_is_as_deep_as_there_are_draft_steps() -> None:
    assert read_bounds(TREES) == (TreeBounds(16, 4),)


def test_an_ngram_tree_may_be_a_chain() -> None:
    ngram = {"speculative_algorithm": "NGRAM", "speculative_num_steps": None}
    assert read_bounds(TREES | ngram) == (TreeBounds(16, 15),)
    # 0.5.13's worker never commits a state
    assert [release.version for release in RELEASES if not release.ngram] == ["0.5.13"]
    with pytest.raises(PluginError, match="expected one of EAGLE, EAGLE3, NEXTN, got NGRAM"):
        read_bounds(TREES | ngram, ngram=False)


@pytest.mark.parametrize(
    "change",
    [
        {"speculative_algorithm": None},
        {"speculative_eagle_topk": 1},
        {"speculative_eagle_topk": None},
    ],
)
@pytest.mark.parametrize("also", [{}, {"enable_linear_replayssm": True, "pp_size": 2}])
def test_without_trees_every_flag_is_the_engines_own(
    change: dict[str, Any], also: dict[str, Any]
) -> None:
    assert read_bounds(TREES | change | also) is None


def test_chains_are_served_where_they_are_asked_for() -> None:
    chain = TREES | {"speculative_eagle_topk": 1, "speculative_num_draft_tokens": 5}
    assert read_bounds(chain, chains=True) == (TreeBounds(5, 4, chain=True),)
    assert read_bounds(TREES, chains=True) == read_bounds(TREES)
    assert read_bounds({"speculative_algorithm": None}, chains=True) is None
    with pytest.raises(PluginError, match="enable-linear-replayssm is True"):
        read_bounds(chain | {"enable_linear_replayssm": True}, chains=True)
    with pytest.raises(PluginError, match="got STANDALONE; take one of them, or unset BOLEGEN_CH"):
        read_bounds(chain | {"speculative_algorithm": "STANDALONE"}, chains=True)
    # its root may branch, and the engine tells no links
    ngram = chain | {"speculative_algorithm": "NGRAM"}
    assert read_bounds(ngram) is None
    with pytest.raises(PluginError, match="--speculative-ngram-max-bfs-breadth: expected above 1"):
        read_bounds(ngram, chains=True)
    with pytest.raises(PluginError, match="BOLEGEN_CHAINS: expected chains of one length"):
        read_bounds(chain | {"speculative_adaptive": True}, chains=True)


@pytest.mark.parametrize("name", SERVED)
def test_a_refusal_names_the_flag_and_the_way_out(name: str) -> None:
    with pytest.raises(PluginError, match=f"--{name.replace('_', '-')} is 'odd'.*BOLEGEN_ENABLE"):
        read_bounds(TREES | {name: "odd"})


def test_other_drafters_and_sizes_are_refused() -> None:
    with pytest.raises(PluginError, match="--speculative-algorithm: expected one of EAGLE"):
        read_bounds(TREES | {"speculative_algorithm": "STANDALONE"})
    with pytest.raises(PluginError, match="--speculative-num-draft-tokens: expected 2 to 256"):
        read_bounds(TREES | {"speculative_num_draft_tokens": 257})


@pytest.mark.parametrize("release", RELEASES, ids=lambda r: r.version)
@pytest.mark.parametrize("suffix", ["", ".post1", "+cu130"])
def test_a_release_is_found_with_its_post_releases(release: Any, suffix: str) -> None:
    assert find_release(release.version + suffix) is release


@pytest.mark.parametrize("version", ["0.5.12", "0.5.24", "0.6.0", "0.5.17rc1"])
def test_other_releases_are_refused(version: str) -> None:
    with pytest.raises(PluginError, match=f"expected 0.5.13 to 0.5.23, got {version}"):
        find_release(version)


def test_the_support_matrix_of_the_document_is_the_tables() -> None:
    assert write_matrix() in (ROOT / "docs" / "sglang.md").read_text("utf-8")
