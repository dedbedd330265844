"""An engine whose catalog is lost while it runs goes on with what the store holds."""

import pytest

from kvferry.catalog.base import LOST
from kvferry.catalog.memory import MemoryCatalog
from kvferry.catalog.reviving import RevivingCatalog
from kvferry.errors import IncompatibleError, UnavailableError
from kvferry.testing.catalog import CAPACITY_BYTES, SEGMENT_BYTES, STORE, A, key
from kvferry.testing.clock import ManualClock


class Losable(MemoryCatalog):
    """Lost until it is opened again."""

    is_lost = False

    def open(self, *arguments):
        self.is_lost = False
        return super().open(*arguments)

    def lookup(self, namespace, keys):
        if self.is_lost:
            raise UnavailableError(LOST, "gone")
        return super().lookup(namespace, keys)


@pytest.fixture
def inner():
    catalog = Losable(ManualClock())
    catalog.open(STORE, CAPACITY_BYTES, SEGMENT_BYTES)
    return catalog


def test_the_call_that_finds_it_out_opens_it_and_goes_on(inner):
    revived = []

    def revive():
        inner.open(STORE, CAPACITY_BYTES, SEGMENT_BYTES)
        catalog.attach(A)  # on the same object: what follows an opening calls verbs
        revived.append(True)

    catalog = RevivingCatalog(inner, revive)
    assert catalog.lookup(A.namespace, [key("x")]) == [None]
    assert revived == []
    inner.is_lost = True
    assert catalog.lookup(A.namespace, [key("x")]) == [None]
    assert catalog.lookup(A.namespace, [key("x")]) == [None]
    assert revived == [True]
    assert catalog.snapshot().namespaces == {A.namespace}


def test_until_it_can_be_opened_each_call_fails_and_tries_again(inner):
    errors = [IncompatibleError("pages.owned", "not yet"), UnavailableError("catalog.server", "no")]

    def revive():
        inner.open(STORE, CAPACITY_BYTES, SEGMENT_BYTES)
        if errors:
            raise errors.pop(0)

    catalog = RevivingCatalog(inner, revive)
    inner.is_lost = True
    for said in ("not yet", "no"):
        with pytest.raises(UnavailableError, match=said) as caught:
            catalog.sweep() if not inner.is_lost else catalog.lookup(A.namespace, [])
        assert caught.value.kind == LOST
    assert catalog.sweep().deletable_segments == ()


def test_other_failures_are_the_callers(inner):
    catalog = RevivingCatalog(inner, lambda: pytest.fail("nothing was lost"))
    with pytest.raises(UnavailableError, match="unknown_namespace"):
        catalog.reserve(A.namespace, 1, 30.0)
