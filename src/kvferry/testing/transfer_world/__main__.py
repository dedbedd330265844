"""Runs worlds by seed. A run that fails prints its seed, the checker and the last events."""

import argparse
import sys
from collections import Counter

from kvferry.testing.transfer_world.world import World


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kvferry.testing.transfer_world", description=__doc__
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--runs", type=int, default=1, help="runs with consecutive seeds")
    parser.add_argument("--steps", type=int, default=3000, help="small things that happen in a run")
    parser.add_argument("--counts", action="store_true", help="print what happened")
    arguments = parser.parse_args()
    counts: Counter[str] = Counter()
    for seed in range(arguments.seed, arguments.seed + arguments.runs):
        world = World(seed)
        try:
            world.run(arguments.steps)
        except BaseException:
            print(f"seed {seed} failed; the last events:", *world.events, sep="\n  ")
            raise
        counts.update(world.counts)
    if arguments.counts:
        for name, count in sorted(counts.items()):
            print(f"{count:10g} {name}")
    print(f"{arguments.runs} runs from seed {arguments.seed}: all five checkers are content")
    return 0


if __name__ == "__main__":
    sys.exit(main())
