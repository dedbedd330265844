"""Which boundary can be served: one token too far is garbage in the KV cache, one chunk too short
is time lost."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.device.base import SKIP
from kvferry.offload.chunks import (
    blocks_to_load,
    first_needed_chunk,
    runs_of,
    servable_boundary,
    span_blocks,
)
from tests.offload.parts import make_part


def is_servable(parts, hits, computed, boundary):
    """By the meaning: each token that the next one looks at is in memory or in a chunk that is
    there."""
    for part, is_hit in zip(parts, hits, strict=True):
        first = 0 if part.window_tokens is None else max(0, boundary - part.window_tokens + 1)
        for token in range(max(first, computed), boundary):
            chunk = token // part.chunk_tokens
            if chunk >= len(is_hit) or not is_hit[chunk]:
                return False
    return True


def best_boundary(parts, hits, computed, limit):
    candidates = [
        boundary
        for boundary in range(computed + 1, limit + 1)
        if all(boundary % part.chunk_tokens == 0 for part in parts)
        and is_servable(parts, hits, computed, boundary)
    ]
    return max(candidates, default=computed)


PARTS = st.lists(
    st.builds(
        make_part,
        chunk_tokens=st.sampled_from([4, 8, 16]),
        window_tokens=st.one_of(st.none(), st.integers(32, 50)),
    ),
    min_size=1,
    max_size=3,
)


@settings(max_examples=400, deadline=None)
@given(data=st.data(), parts=PARTS, tokens=st.integers(0, 120), computed_blocks=st.integers(0, 20))
def test_the_boundary_is_the_greatest_that_can_be_served(data, parts, tokens, computed_blocks):
    hits = [
        data.draw(
            st.lists(
                st.sampled_from([True, True, True, False]),
                min_size=tokens // part.chunk_tokens,
                max_size=tokens // part.chunk_tokens,
            )
        )
        for part in parts
    ]
    computed = min(computed_blocks * 4, tokens)
    runs = [hit_runs(*is_hit) for is_hit in hits]
    limit = data.draw(st.sampled_from([tokens, max(0, tokens - 1)]))
    found = servable_boundary(parts, runs, computed, limit)
    assert found == best_boundary(parts, hits, computed, limit)


def hit_runs(*is_hit: bool):
    return runs_of([index for index, hit in enumerate(is_hit) if hit], len(is_hit))


def test_a_local_hit_in_the_middle_of_a_chunk_loads_that_chunk():
    part = make_part(chunk_tokens=16)
    assert servable_boundary([part], [hit_runs(False, True)], 8, 32) == 8
    assert servable_boundary([part], [hit_runs(True, True)], 8, 32) == 32
    assert first_needed_chunk(part, 8, 32) == 0
    blocks = blocks_to_load(part, (1, 2, 3, 4), 0, 8, 32)
    assert blocks == (SKIP, SKIP, 3, 4)


def test_a_window_needs_its_last_tokens_only():
    part = make_part(chunk_tokens=8, window_tokens=17)
    assert servable_boundary([part], [hit_runs(False, False, True, True)], 0, 32) == 32
    assert first_needed_chunk(part, 0, 32) == 2
    part = make_part(chunk_tokens=8, window_tokens=18)
    assert servable_boundary([part], [hit_runs(False, False, True, True)], 0, 32) == 0


def test_blocks_that_are_not_there_are_skipped():
    part = make_part(chunk_tokens=16)
    assert blocks_to_load(part, (0, 0, 7, 8), 1, 0, 32) == (SKIP, SKIP, 7, 8)
    assert blocks_to_load(part, (5, 6, 7, 8), 1, 0, 24) == (5, 6, SKIP, SKIP)
    assert span_blocks(part, [1, 2, 3, 4, 5, 6], 0, 2) == (1, 2, 3, 4, 5, 6)
