"""The simulated world of the transfer connector: producers, consumers, clients and what lies
between them, in one process, stepped by hand, by seed.

weather     clocks that drift, ways that lose, delay and double, ends that stand still
producing   a producer: prefills, keeps blocks, uses them again
consuming   a consumer: requests of honest and other clients, from waiting to checked answer
world       who does what next
pushing     the same where producers push, while they prefill

`python -m kvferry.testing.transfer_world --seed 7` replays a run,
`python -m kvferry.testing.transfer_world.pushing --seed 7` one of the other kind.
"""
