"""A deterministic simulator of weight sync: publisher ranks and receivers that die, stop and lose their links.

    fabric      links, a rendezvous and a board of the ranks, in virtual time; where processes take turns
    network     connections of bytes, and files sent on them, for receivers that bring versions over a network
    memory      blocks of memory that processes share, small enough that each extent is a few bytes
    seams       where these are put in place of the real ones; all decisions are those of Holdfast's own code
    faults      what goes wrong in one schedule, drawn from its seed
    job         publisher ranks, receivers, and who starts them again
    invariants  what must hold, looked at whenever a process takes a turn
    deltas      a model of sparse deltas, folds and chains, over Holdfast's own encoding of changes
    schedule    one seed, from the first publisher to the last verdict
    mutations   the protocol broken on purpose; network_mutations: what is brought over a network

Time, processes and threads are those of the checkpoint simulator (``simulator.scheduler``).

``python -m weight_sync --seed N`` (with ``tests/simulation`` on the path) replays a schedule, with a trace.
"""
