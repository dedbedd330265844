"""Two tenants on one store: one that floods it leaves the other what it is guaranteed."""

import pytest
from typer.testing import CliRunner

from kvferry.cli.main import app
from kvferry.keys import tenant_id
from tests.e2e import prompts

PROMPT = prompts.tokens(1000)
FULL_CHUNK_TOKENS, PAGE_COUNT = 960, 15
SMALL = {"capacity_bytes": 16 << 20, "segment_bytes": 2 << 20, "grace_s": 0.5}
FLOOD = [prompts.tokens(1000, seed) for seed in range(100, 160)]


def guarantee(store, tenant: str) -> None:
    """What it has now."""
    shares = {stats.share.tenant: stats.segment_count for stats in store.stats().shares}
    size = str(shares[tenant_id(tenant)] * SMALL["segment_bytes"])
    where = [str(store.pages), "--catalog", store.catalog_url]
    command = ["limit", *where, "--tenant", tenant, "--guaranteed", size]
    assert CliRunner().invoke(app, command, catch_exceptions=False).exit_code == 0


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
    for prompt in FLOOD:
        engine_b.generate([prompt], max_tokens=1)
    engine_b.close()
    evicted_count = store.stats().evicted_count

    engine_a.open(model("full"), **store.settings(tenant="one", **SMALL))
    warm = engine_a.generate([PROMPT])
    engine_a.close()
    assert evicted_count > 0, "the flood was none"
    assert (warm.external_hit_tokens == FULL_CHUNK_TOKENS) is is_limited
    assert warm.tokens == cold.tokens
