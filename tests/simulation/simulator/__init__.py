"""A deterministic simulator of whole jobs that save: real code of Holdfast on a simulated system.

    scheduler    virtual time, processes that can be killed, paused and cut off; threads as greenlets
    filesystem   inodes, and what a power cut leaves of those that were not synced
    system       `os`, `fcntl` and `shutil` over that file system, with slow and failing calls
    store        a Store of torch's kind whose connections are slow, drop and end
    objects      an object store, below the real client and the real storage
    bucket_view  what is in it, as the checker sees it
    engine       an engine process: the real engine's control loop and attempts, its socket simulated
    seams        where the simulated system is put in place of the real one
    job          trainers: sessions, saves, retention, restarts; and engines that outlive them
    invariants   what must hold, looked at all the time and after each restart
    faults       what goes wrong in one schedule, drawn from its seed
    schedule     one seed, from the empty disk to the last verdict
    crashes      one crash, at every call of small schedules
    mutations    the protocol broken on purpose

It replaces names that everything in a process looks up, so it runs in processes of its own.

``python -m simulator --seed N`` (with ``tests/simulation`` on the path) replays a schedule, with a trace.
"""
