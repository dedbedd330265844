"""`kvferry bench`: numbers that people choose storage by must come from work that was done."""

import dataclasses
from dataclasses import dataclass, field

import pytest

from kvferry.cli import bench_copies, bench_io
from kvferry.cli.bench_io import Plan, Pool, Sample
from kvferry.clock import SystemClock
from kvferry.errors import InternalError


@dataclass
class Fake:
    """A contender that takes a given time and says what it was asked."""

    name: str
    elapsed_s: float
    passes: list = field(default_factory=list)

    def run(self, plan: Plan, is_read: bool) -> Sample:
        assert plan.path.stat().st_size == plan.file_bytes
        self.passes.append(is_read)
        return Sample(plan.file_bytes, self.elapsed_s, self.elapsed_s / 2)


@pytest.fixture
def plan(tmp_path):
    return Plan(tmp_path / "file", 8192, block_count=20, depth=2, is_direct=False, round_count=2)


@pytest.mark.parametrize("verifies", [True, False])
@pytest.mark.parametrize("slice_count", [1, 3])
def test_the_pool_passes_over_the_whole_file(plan, verifies, slice_count):
    plan = dataclasses.replace(plan, slice_count=slice_count)
    pool = Pool(SystemClock(), verifies)
    report = bench_io.measure(plan, [pool])
    assert report["results"]["read"][pool.name]["gb_per_s"] > 0
    assert not plan.path.exists()


def test_the_pool_does_not_count_blocks_that_it_could_not_verify(plan):
    plan.path.write_bytes(bytes(plan.file_bytes))
    with pytest.raises(InternalError, match="failed"):
        Pool(SystemClock()).run(plan, is_read=True)


def test_everyone_is_compared_with_the_fastest_engine_of_fio(plan):
    contenders = [Fake("fio slow", 4e-6), Fake("fio fast", 2e-6), Fake("kvferry", 1e-6)]
    passes = []
    report = bench_io.measure(plan, contenders, lambda: passes.append(1))
    assert len(passes) == 2 * 2 * 3
    ratios = report["ratios_to_best_fio"]["read"]
    assert ratios["kvferry"] == {"gb_per_s": 2.0, "cpu_s_per_gib": 0.5}
    assert ratios["fio fast"] == {"gb_per_s": 1.0, "cpu_s_per_gib": 1.0}
    assert contenders[0].passes == [False, True] * 2
    assert contenders[2].passes == [False, False, True] * 2  # its file is what all read


def test_copies_are_measured_for_each_layout():
    found = bench_copies.measure(SystemClock(), 1)
    assert [row["layout"] for row in found] == [layout.name for layout in bench_copies.LAYOUTS]
    assert all(rate > 0 for row in found for rate in row["gb_per_s"].values())
