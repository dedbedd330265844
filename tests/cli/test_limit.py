"""An operator gives tenants their part of a store, sees it, and is told what cannot be kept."""

import pytest

pytest.importorskip("kvferry._native", reason="posix pages need the native extension")
from typer.testing import CliRunner

from kvferry.catalog.base import EVERYBODY, NO_MAXIMUM, Refused
from kvferry.catalog.lmdb import LmdbCatalog
from kvferry.catalog.memory import MemoryCatalog
from kvferry.cli.main import app
from kvferry.keys import tenant_id
from kvferry.offload.space.quotas import tell_quotas
from kvferry.pages.limits import LIMITS, read_limits
from tests.cli.stored import CAPACITY_BYTES, CLOCK, MINE, MINE_PAGES, SEGMENT_BYTES, Filled

TEAM = tenant_id("team")


@pytest.fixture
def filled(tmp_path):
    filled = Filled(tmp_path, f"lmdb://{tmp_path}/catalog")
    yield filled
    filled.close()


def refused(filled, *arguments):
    """The message of a command that fails."""
    command = ["limit", str(filled.root), "--catalog", filled.url, *arguments]
    return str(CliRunner().invoke(app, command).exception)


def quotas(catalog):
    return {owner: row[:2] for owner, row in catalog.snapshot().quotas.items()}


def test_a_limit_is_kept_by_the_catalog_at_once(filled):
    report = filled.say("limit", "--tenant", "team", "--maximum", "1MiB")
    (one,) = report["limits"]
    assert (one["tenant"], one["guaranteed_bytes"], one["maximum_bytes"]) == ("team", 0, 1 << 20)
    assert report["is_told"]
    segments = [filled.catalog.grow(MINE, TEAM) for _ in range(5)]
    assert [isinstance(segment, int) for segment in segments] == [True] * 4 + [False]
    assert segments[4] is Refused.QUOTA


def test_sizes_are_rounded_to_whole_segments_in_favour_of_the_guarantee(filled):
    filled.say("limit", "--tenant", "team", "--guaranteed", "1", "--maximum", "600KiB")
    assert quotas(filled.catalog) == {TEAM: (1, 2)}
    report = filled.say("limit")
    assert report["limits"][0]["guaranteed_bytes"] == SEGMENT_BYTES


def test_what_is_not_said_stays(filled):
    filled.say("limit", "--tenant", "team", "--guaranteed", "1MiB")
    filled.say("limit", "--tenant", "team", "--maximum", "2MiB")
    filled.say("limit", "--namespace", MINE.hex()[:8], "--maximum", "3MiB")
    assert quotas(filled.catalog) == {TEAM: (4, 8), MINE: (0, 12)}
    filled.say("limit", "--tenant", "team", "--remove")
    assert quotas(filled.catalog) == {MINE: (0, 12)}


def test_a_time_to_live_is_of_one_or_of_all(filled):
    filled.say("limit", "--ttl", "36h")
    filled.say("limit", "--tenant", "team", "--ttl", "90", "--maximum", "1MiB")
    rows = filled.catalog.snapshot().quotas
    assert rows[EVERYBODY] == (0, NO_MAXIMUM, 36 * 3600.0, 0.0)
    assert rows[TEAM] == (0, 4, 90.0, 0.0)
    filled.say("limit", "--remove")
    filled.say("limit", "--tenant", "team", "--ttl", "0")
    assert filled.catalog.snapshot().quotas == {TEAM: (0, 4, 0.0, 0.0)}


def test_a_new_catalog_is_told_by_whoever_opens_the_store(filled):
    """The limits are the store's; a catalog that was lost does not take them with it."""
    filled.say("limit", "--tenant", "team", "--guaranteed", "1MiB")
    catalog = MemoryCatalog(CLOCK)
    catalog.open(filled.facts.store_id, CAPACITY_BYTES, SEGMENT_BYTES)
    tell_quotas(catalog, filled.root, filled.facts)
    assert quotas(catalog) == {TEAM: (4, NO_MAXIMUM)}


def test_guarantees_that_the_store_does_not_have_are_refused(filled):
    filled.say("limit", "--tenant", "team", "--guaranteed", "3MiB")
    message = refused(filled, "--tenant", "other", "--guaranteed", "1025KiB")
    assert "kvferry limit" in message
    assert [limit.tenant for limit in read_limits(filled.root)] == ["team"]
    result = CliRunner().invoke(app, ["resize", str(filled.root), "2MiB", "--force"])
    assert "guaranteed" in str(result.exception)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--maximum", "1GiB"),
        ("--tenant", "team"),
        ("--tenant", "team", "--namespace", "6d6d6d6d", "--maximum", "1MiB"),
        ("--tenant", "team", "--maximum", "100KiB"),
        ("--tenant", "team", "--maximum", "1MiB", "--guaranteed", "2MiB"),
        ("--tenant", "team", "--maximum", "much"),
        ("--ttl", "1 week"),
        ("--namespace", "00112233", "--maximum", "1MiB"),
    ],
)
def test_what_makes_no_limit_changes_nothing(filled, arguments):
    message = refused(filled, *arguments)
    assert "maximum" in message or "--" in message or "ttl" in message
    assert not (filled.root / LIMITS).exists()


def test_a_damaged_file_says_what_to_do(filled):
    (filled.root / LIMITS).write_text("{}")
    assert "delete it" in refused(filled)


def test_status_shows_tenants(filled):
    filled.store(MINE, MINE_PAGES, "team")
    filled.store(MINE, MINE_PAGES + 1, "nobody")
    filled.say("limit", "--tenant", "team", "--guaranteed", "1MiB")
    tenants = {tenant["name"]: tenant for tenant in filled.say("status")["catalog"]["tenants"]}
    assert tenants["team"]["pages"] == 1
    assert tenants["team"]["guaranteed_bytes"] == 1 << 20
    assert tenants[tenant_id("nobody").hex()[:12]]["segments"] == 1
    assert tenants["(none)"]["pages"] == MINE_PAGES + 3
    result = CliRunner().invoke(app, ["status", str(filled.root), "--catalog", filled.url])
    assert "team" in result.stdout


def test_a_catalog_that_was_made_anew_knows_whose_pages_are_whose(filled, tmp_path):
    filled.store(MINE, MINE_PAGES, "team")
    url = f"lmdb://{tmp_path}/another"
    filled.url = url
    command = ["catalog", "rebuild", str(filled.root), "--catalog", url]
    assert CliRunner().invoke(app, command, catch_exceptions=False).exit_code == 0
    catalog = LmdbCatalog(tmp_path / "another", CLOCK)
    catalog.open(filled.facts.store_id, CAPACITY_BYTES, SEGMENT_BYTES)
    counts = {share.share.tenant: share.page_count for share in catalog.stats().shares}
    catalog.close()
    assert counts[TEAM] == 1
