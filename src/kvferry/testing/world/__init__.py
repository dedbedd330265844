"""The simulated world: engines, store and catalog in one process, stepped by hand, by seed.

shape       what the model's KV cache looks like; how one engine is set up
meaning     what the bytes of a block and of a page must be: a function of all tokens before them
memory      the bytes of one rank's blocks
blocks      block pool and block tables with a prefix cache, as vLLM has them
requests    one request and its true answer
scheduler   waiting, matching, allocating, preempting: vLLM's scheduler in small
sibling     a second connector, whose loads are wrong
rank        one worker: its jobs, mover, runner and memory
engine      scheduler and ranks, one step after the other
storage     what all engines share: the medium of the pages, the catalog, their faults
checks      what must hold at all times
world       who does what next

`python -m kvferry.testing.world --seed 7` replays a run.
"""
