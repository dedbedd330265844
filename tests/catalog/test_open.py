"""A wrong URL is a message at start that says what to write, never another backend."""

import pytest

from kvferry.catalog.lmdb import LmdbCatalog
from kvferry.catalog.memory import MemoryCatalog
from kvferry.catalog.open import open_url
from kvferry.errors import ConfigError
from kvferry.testing.clock import ManualClock


def test_urls_name_their_catalogs(tmp_path):
    assert isinstance(open_url("memory:", ManualClock()), MemoryCatalog)
    catalog = open_url(f"lmdb://{tmp_path}/a", ManualClock())
    assert isinstance(catalog, LmdbCatalog)
    catalog.open(b"s" * 16, 4096, 4096)
    catalog.close()
    assert (tmp_path / "a").is_dir()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("lmbd:///var/kv", "did you mean lmdb:///absolute/path?"),
        ("memry:", "did you mean memory:?"),
        ("memory://x", "did you mean memory:?"),
        ("lmdb://relative", "did you mean lmdb:///absolute/path?"),
        ("lmdb:///", "did you mean lmdb:///absolute/path?"),
        ("postgres://host", "lmdb:///absolute/path or valkey://"),
        ("valkye://host:6379", "did you mean valkey://[user:password@]host:port[/database]?"),
        ("valkey://host:many", "not of the form valkey://"),
        ("valkey://host/first", "not of the form valkey://"),
        ("valkey://host?ca_file=/x", "not of the form valkey://"),
        ("valkey://", "not of the form valkey://"),
    ],
)
def test_other_urls_say_what_to_write(url, said):
    with pytest.raises(ConfigError, match=r"catalog\.url") as caught:
        open_url(url, ManualClock())
    assert said in str(caught.value)
