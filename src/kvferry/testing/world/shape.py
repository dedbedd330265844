"""What is drawn by seed before anything happens: the model, and the set-up of each engine."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.catalog.base import Quota
from kvferry.config import Config
from kvferry.keys import namespace_digest, tenant_id
from kvferry.layout import Placement
from kvferry.offload.base import Part
from kvferry.testing.clock import Chance

BLOCK_TOKENS = 4
CONTENT_BYTES = 16
"""Of one block, layer and head."""
PROMPT_TOKENS_MAX = 72
ANSWER_TOKENS_MAX = 24


@dataclass(frozen=True)
class Group:
    """One cache group. `window_tokens`: None for full attention."""

    head_count: int
    layer_count: int
    chunk_tokens: int
    window_tokens: int | None

    @property
    def block_bytes(self) -> int:
        """Content of one block, all heads and layers."""
        return self.head_count * self.layer_count * CONTENT_BYTES


@dataclass(frozen=True)
class Model:
    """What all engines of a world run. Every stage of the pipeline has its layers of each group."""

    groups: tuple[Group, ...]
    stage_count: int

    def parts(self) -> tuple[Part, ...]:
        """All parts, as identities name them."""
        return tuple(
            self._part(stage, index)
            for stage in range(self.stage_count)
            for index in range(len(self.groups))
        )

    def _part(self, stage: int, index: int) -> Part:
        group = self.groups[index]
        record = {"stage": stage, "group": index}
        return Part(
            stage=stage,
            group_index=index,
            namespace=namespace_digest(record),
            group=index + 1,
            block_tokens=BLOCK_TOKENS,
            chunk_tokens=group.chunk_tokens,
            slice_count=group.head_count,
            payload_bytes=group.layer_count * group.chunk_tokens // BLOCK_TOKENS * CONTENT_BYTES,
            description=str(record),
            window_tokens=group.window_tokens,
        )


def draw_model(chance: Chance) -> Model:
    full, windowed = _draw_group(chance, None), _draw_group(chance, chance.choice([16, 18, 32, 33]))
    groups = chance.choice([(full,), (full,), (full,), (full, windowed), (windowed, full)])
    if chance.random() < 0.1:
        groups = (windowed,)
    return Model(groups, stage_count=2 if chance.random() < 0.15 else 1)


def _draw_group(chance: Chance, window_tokens: int | None) -> Group:
    chunks = [8] if window_tokens is not None and window_tokens < 32 else [8, 16]
    return Group(
        chance.choice([1, 2, 2]), chance.choice([1, 2]), chance.choice(chunks), window_tokens
    )


@dataclass(frozen=True)
class Setup:
    """How one engine is run. `rank_count` ranks, stage by stage, `tp` of them in each.
    `takes_loaded_first`: as vLLM does since 0.32; before, a request without room stands in the way
    of those whose loads have ended."""

    model: Model
    tp: int
    block_count: int
    step_tokens: int
    running_max: int
    is_async: bool
    draft_count: int
    has_prefix_cache: bool
    sibling_chance: float
    is_sibling_first: bool
    takes_loaded_first: bool
    staging_slots: int
    stuck_gather_chance: float
    config: Config

    @property
    def rank_count(self) -> int:
        return self.model.stage_count * self.tp

    def placement(self, group: Group, tp_index: int) -> Placement:
        """The heads of one rank: its share, or all that there are, with others."""
        if group.head_count < self.tp:
            return Placement(0, group.head_count, tp_index, self.tp)
        share = group.head_count // self.tp
        return Placement(tp_index * share, share)


def draw_setup(chance: Chance, model: Model, tenant: str) -> Setup:
    needed = (PROMPT_TOKENS_MAX + ANSWER_TOKENS_MAX) // BLOCK_TOKENS + 3
    is_async = chance.random() < 0.4
    return Setup(
        model=model,
        tp=chance.choice([1, 1, 2]),
        block_count=len(model.groups) * needed + chance.choice([2, 6, 12, 60]),
        step_tokens=chance.choice([8, 16, 24, 64, 200]),
        running_max=chance.choice([2, 4, 8]),
        is_async=is_async,
        draft_count=0 if is_async else chance.choice([0, 0, 1, 3]),
        has_prefix_cache=chance.random() < 0.6,
        sibling_chance=chance.choice([0, 0.3]),
        is_sibling_first=chance.random() < 0.5,
        takes_loaded_first=chance.random() < 0.5,
        staging_slots=chance.choice([2, 3, 6, 12]),
        stuck_gather_chance=chance.choice([0, 0.1, 0.5]),
        config=_draw_config(chance, tenant),
    )


def _draw_config(chance: Chance, tenant: str) -> Config:
    """Times are a thousandth to a tenth of the usual ones: a step takes a millisecond here."""
    return Config(
        pages="memory:",
        tenant=tenant,
        lookup_deadline_s=chance.choice([0.04, 0.2]),
        load_deadline_s=chance.choice([0.05, 0.3]),
        store_deadline_s=0.4,
        reservation_lease_s=0.8,
        grace_s=0.2,
        failed_key_ttl_s=0.3,
        reserve_ahead_count=chance.choice([1, 4, 8]),
        cost_model=chance.random() < 0.2,
        weights_id=chance.choice([None, None, "step 2"]),
    )


@dataclass(frozen=True)
class Tenancy:
    """Whose a store of so many segments is: engine after engine is of the next tenant."""

    segment_count: int
    tenants: Sequence[str]
    quotas: Sequence[Quota]


def draw_tenancy(chance: Chance, segment_count: int) -> Tenancy:
    tenants = chance.choice([("",), ("one", "two"), ("", "one", "two", "one")])
    one, two, half = tenant_id("one"), tenant_id("two"), segment_count // 2
    quotas = chance.choice(
        [
            [],
            [Quota(one, half)],
            [Quota(one, half), Quota(two, 0, half)],
            [Quota(one, half), Quota(two, half)],
            [Quota(one, 1, half), Quota(tenant_id(""), half)],
        ]
    )
    return Tenancy(segment_count, tenants, quotas)
