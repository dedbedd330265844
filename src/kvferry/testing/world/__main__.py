"""Runs worlds by seed: see `testing.replay`."""

import sys

from kvferry.testing import replay
from kvferry.testing.world.world import World

if __name__ == "__main__":
    sys.exit(replay.main("kvferry.testing.world", World))
