"""Two tenants on one store: one that floods it leaves the other what it is guaranteed."""

import itertools
import time

import pytest
from typer.testing import CliRunner

from kvferry.cli.main import app
from kvferry.keys import tenant_id
from tests.e2e import prompts

PROMPT = prompts.tokens(1000)
FULL_CHUNK_TOKENS, PAGE_COUNT = 960, 15
SMALL = {"capacity_bytes": 16 << 20, "segment_bytes": 2 << 20, "grace_s": 0.5}
FLOOD_PAGES = 2 * 16 * 8
"""More than the store has slots: what is not kept for somebody is gone."""
PATIENCE_S = 120.0


def guarantee(store, tenant: str) -> None:
    """What it has now."""
    shares = {stats.share.tenant: stats.segment_count for stats in store.stats().shares}
    size = str(shares[tenant_id(tenant)] * SMALL["segment_bytes"])
    where = [str(store.pages), "--catalog", store.catalog_url]
    command = ["limit", *where, "--tenant", tenant, "--guaranteed", size]
    assert CliRunner().invoke(app, command, catch_exceptions=False).exit_code == 0


def flood(engine, store) -> None:
    """Until so many pages had to go. Room is made once a second, whatever the engine does."""
    give_up_s = time.monotonic() + PATIENCE_S
    for seed in itertools.count(100):
        if store.stats().evicted_count >= FLOOD_PAGES:
            return
        assert time.monotonic() < give_up_s, "the flood was none"
        engine.generate([prompts.tokens(1000, seed)], max_tokens=1)


@pytest.mark.parametrize("is_limited", [True, False], ids=["guaranteed", "without"])
def test_a_tenant_that_floods_leaves_another_what_it_is_guaranteed(
    engine_a, engine_b, model, store, is_limited
):
    engine_a.open(model("full"), **store.settings(tenant="one", **SMALL))
    store.make_ready(engine_a, PAGE_COUNT)
    cold = engine_a.generate([PROMPT])
    store.wait_for_pages(PAGE_COUNT)
    engine_a.close()
    if is_limited:
        guarantee(store, "one")

    engine_b.open(model("full"), **store.settings(tenant="two", **SMALL))
    store.make_ready(engine_b, PAGE_COUNT)
    flood(engine_b, store)
    engine_b.close()

    engine_a.open(model("full"), **store.settings(tenant="one", **SMALL))
    warm = engine_a.generate([PROMPT])
    engine_a.close()
    assert (warm.external_hit_tokens == FULL_CHUNK_TOKENS) is is_limited
    assert warm.tokens == cold.tokens
