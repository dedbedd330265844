"""One consumer rank and one producer rank of this process, and what each engine's thread says."""

from kvferry.errors import UnavailableError
from kvferry.testing.clock import ManualClock
from kvferry.testing.copier import ReferenceCopier
from kvferry.testing.kv_memory import EngineShape, GroupModel, engine_memory, rank_layouts
from kvferry.testing.tally import Tally
from kvferry.transfer.consumer_rank import ConsumerRank
from kvferry.transfer.halves import ConsumerPlan, Finished, Hold, Load, ProducerPlan, Report, Watch
from kvferry.transfer.handshake import Introduction, RankEnd
from kvferry.transfer.memory import Fabric, MemoryLink, Motion
from kvferry.transfer.mover import Mover
from kvferry.transfer.params import Offer
from kvferry.transfer.producer_rank import ProducerRank
from kvferry.transfer.session import Peers
from kvferry.transfer.settings import Settings
from kvferry.transfer.unload import Unloaders

SLOT = 4096
SETTINGS = Settings(
    secret=b"0123456789abcdef",
    lease_s=10.0,
    lease_total_s=100.0,
    staging_bytes=4 * SLOT,
    slot_bytes=SLOT,
    quarantine_bytes_max=SLOT,
    claim_deadline_s=5.0,
    read_deadline_s=30.0,
    rest_s=3.0,
    redial_s=1.0,
)
MODELS = (GroupModel(("a", "b"), 2),)
SHAPE = EngineShape(1, (4,), (1,), ("LBHN",), 16)
OTHER_SHAPE = EngineShape(1, (4,), (1,), ("LBNH",), 16)
"""Blocks of as many tokens, in another order: they go through pages."""
TOKENS = 8


class Script:
    """Reads and letters do as told. `mute`: names whose letters are lost."""

    def __init__(self):
        self.motion = Motion.END
        self.may_stray = False
        self.mute = set()

    def moves(self, poster, peer):
        return self.motion

    def strays(self, has_rival):
        return self.may_stray

    def letters(self, sender, receiver):
        return 0 if sender in self.mute else 1


class Rig:
    """Both ranks, in step. `wrap`: what is put around each link; `source_settings`,
    `target_shape`: where the producer's are others, or the consumer's."""

    def __init__(
        self,
        settings=SETTINGS,
        shape=SHAPE,
        clock=None,
        tally=None,
        script=None,
        wrap=lambda link: link,
        source_settings=None,
        target_shape=None,
    ):
        self.settings, self.wrap = settings, wrap
        self.source_settings = source_settings or settings
        self.clock, self.script = clock or ManualClock(), script or Script()
        self.tally = Tally() if tally is None else tally
        self.fabric = Fabric(self.script)
        self.answers = []  # of the dialer, before the honest one
        self.source = engine_memory(MODELS, shape)
        self.target = engine_memory(MODELS, target_shape or shape)
        ((self.source_group,),), ((self.target_group,),) = self.source, self.target
        self.copiers = []
        self.start_producer()
        self.link = wrap(MemoryLink(self.fabric, self.clock))
        self.link.open()
        layouts = rank_layouts(self.target)
        unloaders = Unloaders(self.make_copier, 1 << 15)
        self.peers = Peers(
            self.settings, self.clock, self.tally, self.link, self, layouts[0], layouts, unloaders
        )
        self.rank = ConsumerRank(
            self.settings, self.clock, self.tally, self.link, self.peers, unloaders, 0
        )
        self.rank.open()
        self.mover = Mover(self.settings, self.clock, self.tally, self.link, self.rank)
        self.dialled = []
        self.report = Report()
        self.finished = []

    @property
    def reachable(self):
        return [self.source_group.memory] if self.settings.direction == "pull" else []

    def start_producer(self):
        self.boot = self.clock.random_bytes(16)
        self.source_link = self.wrap(MemoryLink(self.fabric, self.clock))
        self.source_link.open()
        for memory in self.reachable:
            self.source_link.register(memory)
        self.source_rank = ProducerRank(
            self.source_settings,
            self.clock,
            self.tally,
            self.source_link,
            rank_layouts(self.source)[0],
            self.make_copier,
        )
        self.source_rank.open()
        self.source_mover = Mover(
            self.source_settings, self.clock, self.tally, self.source_link, self.source_rank
        )

    def make_copier(self, regions, geometry):
        self.copiers.append(ReferenceCopier(regions, geometry))
        return self.copiers[-1]

    # The dialer

    def submit(self, offer):
        self.dialled.append(offer)

    def poll(self):
        dialled, self.dialled = self.dialled, []
        return [(offer.boot, self.answer(offer)) for offer in dialled]

    def answer(self, offer):
        if self.answers:
            return self.answers.pop(0)
        if offer.boot != self.boot:
            return UnavailableError("transfer.boot", "another one")
        (layout,) = rank_layouts(self.source)
        description = self.source_link.describe(self.reachable)
        return Introduction(self.boot, (RankEnd(layout, description),))

    # Both engines

    def hold(self, name="text", blocks=(3, 4)):
        """A prefill is done there; what its client carries."""
        for index, block in enumerate(blocks):
            self.source_group.write(block, index, name)
        offer = Offer(
            self.clock.random_bytes(16), self.boot, "host", 1, b"n" * 32, b"k" * 32, TOKENS
        )
        generation = self.clock.random_bytes(16)
        hold = Hold(name, offer.transfer, generation, TOKENS, (tuple(blocks),), offer.key)
        self.source_rank.begin(ProducerPlan((hold,)))
        return offer

    def plan(self, watches=(), loads=(), drops=()):
        self.rank.begin(ConsumerPlan(tuple(watches), tuple(loads), tuple(drops)))

    def load(self, request_id, blocks):
        for block in blocks:
            self.target_group.spoil(block)
        self.plan(loads=[Load(request_id, (tuple(blocks),), 0, TOKENS)])

    def rounds(self, count=10, step_s=0.001):
        for _ in range(count):
            self.step_movers(step_s)
            self.collect()

    def step_movers(self, step_s=0.001):
        self.clock.advance(step_s)
        self.source_mover.step()
        self.rank.begin(ConsumerPlan())
        self.mover.step()

    def collect(self):
        finished = self.rank.collect()
        if finished != Finished():
            self.finished.append(finished)
        self.report = self.report.merge(self.rank.report())

    def granted(self, request_id="r", **hold):
        """An offer that this request has granted."""
        offer = self.hold(**hold)
        self.plan(watches=[Watch(request_id, offer)])
        self.rounds()
        assert request_id in self.report.granted
        return offer

    def outcome(self, request_id):
        """True: loaded, False: failed, None: neither yet."""
        found = [f for f in self.finished if request_id in f.done]
        assert len(found) <= 1
        return request_id not in found[0].failed if found else None

    def holds(self, blocks, name="text"):
        return all(self.target_group.holds(b, i, name) for i, b in enumerate(blocks))
