"""The I/O pool: what was written comes back, and what is not exactly that is refused."""

import dataclasses
import os

import pytest

from kvferry import _native
from kvferry.pages import header
from kvferry.pages.base import Outcome

from .buffers import Buffer
from .slices import (
    DEADLINE_S,
    GEOMETRY,
    PAGE,
    SLICE_BYTES,
    TEMPLATE,
    asking,
    collect,
    native_checksum,
    new_file,
    operation,
    outcome,
    payloads,
    read,
    write,
)


@pytest.fixture
def pool():
    pool = _native.IoPool(2, 2)
    yield pool
    assert pool.close(DEADLINE_S)


@pytest.fixture
def written(pool):
    """A file that holds the page."""
    descriptor = new_file()
    write(pool, operation(descriptor, payloads()))
    yield descriptor
    os.close(descriptor)


def test_a_page_comes_back_with_the_headers_of_the_format(pool, written):
    source, target = payloads(), Buffer(3 * SLICE_BYTES)
    ((result, errno, sums),) = read(pool, operation(written, target))
    assert (result, errno) == (Outcome.OK, 0)
    for i in range(3):
        start = i * SLICE_BYTES
        payload = source.view[start + 4096 : start + SLICE_BYTES]
        assert target.view[start + 4096 : start + SLICE_BYTES] == payload
        assert sums[i] == native_checksum(payload)
        expected = header.pack(PAGE, GEOMETRY, i, sums[i], native_checksum)
        assert target.view[start : start + 4096] == expected


def test_ranks_write_their_extents_and_another_reads_the_whole_page(pool):
    """Pages are independent of the TP degree."""
    descriptor = new_file()
    whole = payloads()
    first, rest = Buffer.of(whole.view[:SLICE_BYTES]), Buffer.of(whole.view[SLICE_BYTES:])
    write(
        pool,
        operation(descriptor, rest, first_slice=1, offset_bytes=SLICE_BYTES),
        operation(descriptor, first),
    )
    assert outcome(pool, descriptor) is Outcome.OK
    os.close(descriptor)


def test_checksums_known_already_are_stamped_as_they_are(pool):
    descriptor = new_file()
    known = [native_checksum(payloads().view[i * SLICE_BYTES + 4096 :][:4096]) for i in range(3)]
    (result,) = write(pool, operation(descriptor, payloads()), checksums=known)
    assert result == (Outcome.OK, 0, tuple(known))
    assert outcome(pool, descriptor) is Outcome.OK
    write(pool, operation(descriptor, payloads()), checksums=[known[0], known[1] ^ 1, known[2]])
    assert outcome(pool, descriptor) is Outcome.CORRUPT
    os.close(descriptor)


def test_a_caller_that_verifies_itself_gets_the_checksums(pool, written):
    os.pwrite(written, b"\xff", SLICE_BYTES + 5000)
    target = Buffer(3 * SLICE_BYTES)
    ((result, _, sums),) = read(pool, operation(written, target), verify_payload=False)
    assert result is Outcome.OK
    assert sums[1] != native_checksum(target.view[SLICE_BYTES + 4096 :][:4096])
    assert outcome(pool, written) is Outcome.CORRUPT


def test_any_flipped_bit_of_a_slice_is_found(pool):
    """Every bit of a header and of a payload with its padding: 65,536 damaged slices."""
    descriptor = new_file()
    write(pool, operation(descriptor, payloads(1)))
    good = int.from_bytes(os.pread(descriptor, SLICE_BYTES, 0), "little")
    batch, targets = 1024, [Buffer(SLICE_BYTES) for _ in range(1024)]
    for first in range(0, SLICE_BYTES * 8, batch):
        damaged = [good ^ 1 << bit for bit in range(first, first + batch)]
        os.pwrite(descriptor, b"".join(d.to_bytes(SLICE_BYTES, "little") for d in damaged), 0)
        operations = [
            operation(descriptor, target, offset_bytes=i * SLICE_BYTES)
            for i, target in enumerate(targets)
        ]
        outcomes = {result for result, _, _ in read(pool, *operations)}
        assert outcomes <= {Outcome.CORRUPT, Outcome.FOREIGN}
    os.close(descriptor)


@pytest.mark.parametrize("field", ["namespace", "key", "generation"])
def test_an_intact_page_of_another_identity_is_foreign(pool, written, field):
    original = getattr(PAGE, field)
    for i in range(len(original)):
        other = original[:i] + b"\xee" + original[i + 1 :]
        assert outcome(pool, written, template=asking(**{field: other})) is Outcome.FOREIGN


def test_what_does_not_name_the_page_may_differ(pool, written):
    asked = asking(parent=bytes(32), chunk_index=9, group=9, tenant=bytes(16))
    assert outcome(pool, written, template=asked) is Outcome.OK


def test_a_page_of_another_shape_or_version_is_foreign(pool, written):
    wider = dataclasses.replace(GEOMETRY, slice_count=4)
    longer = dataclasses.replace(GEOMETRY, payload_bytes=4001)
    later = TEMPLATE[:8] + b"\x02" + TEMPLATE[9:]
    asked = (
        (header.template(PAGE, wider), 4000),
        (header.template(PAGE, longer), 4001),
        (later, 4000),
    )
    for template, payload_bytes in asked:
        result = outcome(pool, written, template=template, payload_bytes=payload_bytes)
        assert result is Outcome.FOREIGN


def test_a_slice_in_the_place_of_another_is_foreign(pool, written):
    swapped = os.pread(written, SLICE_BYTES, SLICE_BYTES)
    os.pwrite(written, swapped, 0)
    assert outcome(pool, written) is Outcome.FOREIGN


def test_a_slice_of_another_generation_inside_a_page_is_foreign(pool, written):
    other = operation(
        written,
        payloads(1),
        first_slice=1,
        offset_bytes=SLICE_BYTES,
        template=asking(generation=bytes(16)),
    )
    write(pool, other)
    assert outcome(pool, written) is Outcome.FOREIGN


def test_a_hole_is_absent_and_a_torn_page_is_not_read(pool, written):
    os.truncate(written, SLICE_BYTES)
    os.truncate(written, 10 * SLICE_BYTES)
    assert outcome(pool, written) is Outcome.ABSENT
    assert outcome(pool, written, slice_count=1) is Outcome.OK
    assert outcome(pool, written, offset_bytes=5 * SLICE_BYTES) is Outcome.ABSENT


@pytest.mark.parametrize("length_bytes", [0, 1, SLICE_BYTES, 3 * SLICE_BYTES - 1])
def test_a_short_file_is_short(pool, written, length_bytes):
    os.truncate(written, length_bytes)
    assert outcome(pool, written) is Outcome.SHORT


def test_each_operation_of_a_batch_has_its_own_result(pool, written):
    good, foreign = Buffer(3 * SLICE_BYTES), Buffer(3 * SLICE_BYTES)
    job = pool.submit_reads(
        [
            operation(written, good),
            operation(written, foreign, template=asking(key=bytes(32))),
            operation(written, Buffer(3 * SLICE_BYTES), offset_bytes=1 << 30),
        ],
        True,
    )
    second = pool.submit_reads([operation(written, Buffer(3 * SLICE_BYTES))], True)
    assert second == job + 1
    assert [result for result, _, _ in collect(pool, 4)] == [
        Outcome.OK,
        Outcome.FOREIGN,
        Outcome.SHORT,
        Outcome.OK,
    ]


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (1, 512, "offset_bytes"),
        (1, -4096, "offset_bytes"),
        (2, 4097, "buffer_address"),
        (3, 1, "slice count"),
        (4, 0, "slice_count"),
        (4, 4, "slice count"),
        (5, 8191, "slice_bytes"),
        (5, 12288, "slice_bytes"),
        (6, 0, "payload_bytes"),
        (6, 4001, "payload_bytes"),
        (6, 4097, "payload_bytes"),
        (7, bytes(255), "256"),
        (7, bytes(4097), "256"),
    ],
)
def test_operations_that_would_touch_other_memory_are_refused(pool, place, value, message):
    fields = list(operation(0, Buffer(3 * SLICE_BYTES)))
    fields[place] = value
    for submit, argument in ((pool.submit_reads, True), (pool.submit_writes, None)):
        with pytest.raises(ValueError, match=message):
            submit([tuple(fields)], argument)


@pytest.mark.parametrize("checksums", [[], [1, 2], [1, 2, 3, 4]])
def test_checksums_must_be_as_many_as_slices(pool, checksums):
    with pytest.raises(ValueError, match="checksums"):
        pool.submit_writes([operation(0, payloads())], checksums)


def test_so_many_threads_read_at_most():
    pool, descriptor = _native.IoPool(4, 1), new_file()
    write(pool, operation(descriptor, payloads()))
    seen = {1: {0}, 4: {0}}
    for _ in range(20):
        for limit, counts in seen.items():
            pool.limit_reads(limit)
            targets = [Buffer(3 * SLICE_BYTES) for _ in range(500)]
            pool.submit_reads([operation(descriptor, target) for target in targets], True)
            ended = 0
            while ended < len(targets):
                counts.add(pool.reading_count)
                ended += len(pool.poll())
    assert max(seen[1]) == 1
    assert max(seen[4]) > 1
    assert pool.close(DEADLINE_S)
    os.close(descriptor)


def test_a_limit_of_no_thread_is_refused(pool):
    with pytest.raises(ValueError, match="thread_count"):
        pool.limit_reads(0)
