"""Runs worlds by seed: see `testing.replay`."""

import sys

from kvferry.testing import replay
from kvferry.testing.transfer_world.world import World

if __name__ == "__main__":
    sys.exit(replay.main("kvferry.testing.transfer_world", World))
