"""The simulator of weight sync in a process of its own: it replaces names that everything in a process looks up.

    python -m weight_sync --seed 17                    replay one schedule, with its trace
    python -m weight_sync --from 0 --count 1000        run many
    python -m weight_sync --mutations --part 0/2       break weight sync in every second way there is

Every fourth seed is a schedule of the model of deltas, the others are of versions in blocks. What was run is told in
lines, of JSON but for the trace; the exit status is 0 where nothing was found that should not have been, 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import sys

from weight_sync import deltas, schedule
from weight_sync.mutations import MUTATIONS, hunt
from weight_sync.seams import simulated_system

DELTAS_EVERY = 4


def tell(**facts):
    print(json.dumps(facts), flush=True)


def is_of_deltas(seed):
    return seed % DELTAS_EVERY == DELTAS_EVERY - 1


def replay(seed):
    result = (deltas if is_of_deltas(seed) else schedule).run_schedule(seed, trace=True)
    print("\n".join(result.lines or ()))
    print(f"seed {seed}: {result.breach or 'every invariant holds'}")
    return result.breach is None


def run(first, count):
    seeds = range(first, first + count)
    whole, committed, of_deltas = True, 0, 0
    for kind, mine in (
        (schedule, [seed for seed in seeds if not is_of_deltas(seed)]),
        (deltas, [seed for seed in seeds if is_of_deltas(seed)]),
    ):
        for result in kind.run_many(mine):
            committed += result.committed
            of_deltas += kind is deltas
            if result.breach is not None:
                whole = False
                tell(broken=f"seed {result.seed}: {result.breach}")
    tell(schedules=count, of_deltas=of_deltas, committed=committed)
    return whole


def break_on_purpose(part, parts):
    whole = True
    for mutation in MUTATIONS[part::parts]:
        found, control = hunt(mutation)
        whole = whole and found is not None and control is None
        tell(
            mutation=mutation.name,
            seed=None if found is None else found.seed,
            breach=None if found is None else str(found.breach),
            control=None if control is None else f"seed {control.seed}: {control.breach}",
        )
    return whole


def main():
    parser = argparse.ArgumentParser(prog="python -m weight_sync", description=__doc__)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--from", dest="first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--mutations", action="store_true")
    parser.add_argument("--part", default="0/1", metavar="NUMBER/PARTS")
    args = parser.parse_args()
    part, parts = map(int, args.part.split("/"))
    with simulated_system():
        if args.seed is not None:
            whole = replay(args.seed)
        elif args.mutations:
            whole = break_on_purpose(part, parts)
        else:
            whole = run(args.first, args.count)
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
