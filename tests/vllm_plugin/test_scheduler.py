"""A block that a step overwrites and nobody names is gathered with another request's content: the
right key, a valid checksum, and wrong tokens in whatever loads it."""

from types import SimpleNamespace

import pytest

from kvferry.config import decode
from kvferry.offload.base import Identity, Report
from kvferry.vllm_plugin import versions
from kvferry.vllm_plugin.connector import described
from kvferry.vllm_plugin.messages import WorkerMetadata, encode
from kvferry.vllm_plugin.scheduler import SchedulerRole
from tests.offload.parts import make_part

TOKENS = [32]


class Planner:
    """Keeps what it was told."""

    def __init__(self):
        self.steps = []

    def on_new_request(self, request):
        self.request = request

    def match(self, request_id, computed_tokens, total_tokens):
        return 0

    def allocated(self, request_id, tables, external_tokens):
        self.tables = tables

    def build(self, step):
        self.steps.append(step)

    def finished(self, request_id, tables):
        pass

    def receive(self, report):
        pass


def blocks(*groups):
    """As vLLM's `KVCacheBlocks`."""
    as_objects = [[SimpleNamespace(block_id=id_) for id_ in group] for group in groups]
    return SimpleNamespace(
        blocks=as_objects, get_block_ids=lambda: tuple(list(group) for group in groups)
    )


def request(request_id="r", tokens=100):
    return SimpleNamespace(request_id=request_id, num_tokens=tokens)


def output(new=(), cached=(), resumed=(), copies=(), preempted=(), state=None):
    """`new`: (id, computed, scheduled); `cached`: (id, computed, scheduled, new blocks)."""
    counts = {item[0]: item[2] for item in (*new, *cached)}
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=id_, num_computed_tokens=computed) for id_, computed, _ in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[item[0] for item in cached],
            num_computed_tokens=[item[1] for item in cached],
            new_block_ids=[item[3] for item in cached],
            resumed_req_ids=set(resumed),
        ),
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
        kv_cache_block_copies=[SimpleNamespace(dst_block_id=target) for target in copies],
        preempted_req_ids=set(preempted),
        kv_connector_block_state=state,
    )


def role(planner, tokens=TOKENS):
    return SchedulerRole(planner, adapters=None, group_block_tokens=tokens)


def test_an_admitted_request_overwrites_all_its_blocks_but_those_that_the_engine_had():
    planner = Planner()
    side = role(planner)
    side.match(request(), 64)
    side.allocated(request(), blocks([7, 8, 9, 10]), 0)
    side.build(output(new=[("r", 64, 36)]))

    assert planner.steps[0].new_blocks == {9, 10}


def test_what_a_loaded_request_gets_later_is_new_and_what_was_loaded_is_not():
    planner = Planner()
    side = role(planner)
    side.match(request(), 0)
    side.allocated(request(), blocks([7, 8]), 64)
    side.build(output())
    side.allocated(request(), blocks([7, 8, 9]), 0)
    side.build(output(new=[("r", 64, 36)]))

    assert [step.new_blocks for step in planner.steps] == [{7, 8}, {9}]


def test_groups_have_block_sizes_of_their_own():
    planner = Planner()
    side = role(planner, [32, 64])
    side.match(request(), 64)
    side.allocated(request(), blocks([0, 2, 3], [4, 5]), 0)
    side.build(output(new=[("r", 64, 36)]))

    assert planner.steps[0].new_blocks == {3, 5}


def test_running_requests_overwrite_what_they_were_given():
    planner = Planner()
    side = role(planner)
    side.build(output(cached=[("a", 64, 1, ([11],)), ("b", 70, 1, None)], copies=[20]))

    assert planner.steps[0].new_blocks == {11, 20}


def test_a_resumed_requests_whole_table_is_not_new():
    """Its table comes whole; what is new in it was told when it was admitted."""
    planner = Planner()
    side = role(planner)
    side.match(request(), 64)
    side.allocated(request(), blocks([1, 2, 3]), 0)
    side.build(output(cached=[("r", 64, 30, ([1, 2, 3],))], resumed=["r"]))

    assert planner.steps[0].new_blocks == {3}


def test_new_blocks_are_told_once():
    planner = Planner()
    side = role(planner)
    side.allocated(request(), blocks([1]), 0)
    side.build(output())
    side.build(output())

    assert planner.steps[1].new_blocks == frozenset()


def test_a_step_names_who_computes_what():
    planner = Planner()
    role(planner).build(output(new=[("a", 0, 64)], cached=[("b", 70, 1, None)], preempted=["c"]))
    step = planner.steps[0]

    assert list(step.request_ids) == ["b", "a"]
    assert list(step.computed_tokens) == [70, 0]
    assert step.scheduled_tokens == {"a": 64, "b": 1}
    assert step.preempted == {"c"}


def test_tables_come_from_the_scheduler_where_it_hands_them_over(monkeypatch):
    monkeypatch.setattr(versions, "reports_failed_loads", lambda: True)
    planner = Planner()
    state = SimpleNamespace(get_block_ids=lambda request_id: ([1, 2],))
    role(planner).build(output(new=[("r", 0, 64)], state=state))

    assert planner.steps[0].tables("r") == ([1, 2],)


def test_tables_are_read_in_the_block_manager_where_the_scheduler_gives_it(monkeypatch):
    monkeypatch.setattr(versions, "reports_failed_loads", lambda: True)
    planner = Planner()
    side = role(planner)
    tables = {"r": blocks([1, 2, 3], [4, 0, 6])}
    side.bind(SimpleNamespace(get_blocks=tables.__getitem__))
    side.build(output(new=[("r", 0, 64)], state=None))
    first, second = planner.steps[0].tables("r")

    assert (len(first), first[1:3], second[:9]) == (3, [2, 3], [4, 0, 6])

    tables["r"] = blocks([1, 2, 3, 7], [4, 0, 6, 8])
    assert planner.steps[0].tables("r")[0][3:] == [7]


def test_the_log_says_where_pages_are_and_under_which_name():
    """Without a line in its log nobody knows whether an engine uses the store at all."""
    lines = []
    config = decode({"pages": "posix:///var/kv", "capacity_bytes": "1GiB"})
    identities = [Identity(rank, 2, 0, b"\xab" * 16, (make_part(),)) for rank in (0, 1)]
    side = SchedulerRole(
        Planner(), None, TOKENS, announce=lambda who: lines.append(described(config, who))
    )
    for identity in identities:
        side.receive(WorkerMetadata((encode(Report((identity,))),)))
        side.receive(WorkerMetadata((encode(Report()),)))

    (line,) = lines
    for word in ("posix:///var/kv", "ab" * 16, str(1 << 30), make_part().namespace.hex()[:12]):
        assert word in line


@pytest.fixture
def before_0_30(monkeypatch):
    monkeypatch.setattr(versions, "reports_failed_loads", lambda: False)


def test_older_versions_tables_are_followed(before_0_30):
    planner = Planner()
    side = role(planner)
    side.allocated(request(), blocks([1, 2]), 0)
    side.build(output(new=[("r", 0, 64)]))
    side.build(output(cached=[("r", 64, 1, ([3],))]))
    side.build(output(cached=[("r", 65, 1, None)]))
    assert list(planner.steps[2].tables("r")) == [[1, 2, 3]]

    side.allocated(request(), blocks([8, 9]), 0)  # preempted, and admitted again
    side.build(output(cached=[("r", 0, 64, ([8, 9],))], resumed=["r"]))
    assert list(planner.steps[3].tables("r")) == [[8, 9]]
