"""The command line of a simulated world: runs it by seed, and shows how a run that failed ended."""

import argparse
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Protocol


class Replayable(Protocol):
    """A world of one seed. `events`: the last ones; `counts`: what happened."""

    events: Iterable[str]
    counts: Counter[str]

    def run(self, step_count: int) -> None: ...


def main(program: str, make_world: Callable[[int], Replayable]) -> int:
    """A run that fails prints its seed and its last events, then raises what the checker said."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--runs", type=int, default=1, help="runs with consecutive seeds")
    parser.add_argument("--steps", type=int, default=3000, help="small things that happen in a run")
    parser.add_argument("--counts", action="store_true", help="print what happened")
    arguments = parser.parse_args()
    counts: Counter[str] = Counter()
    for seed in range(arguments.seed, arguments.seed + arguments.runs):
        world = make_world(seed)
        try:
            world.run(arguments.steps)
        except BaseException:
            print(f"seed {seed} failed; the last events:", *world.events, sep="\n  ")
            raise
        counts.update(world.counts)
    if arguments.counts:
        for name, count in sorted(counts.items()):
            print(f"{count:10g} {name}")
    print(f"{arguments.runs} runs from seed {arguments.seed}: all checkers are content")
    return 0
