"""The simulator in a process of its own: it replaces names that everything in a process looks up.

    python -m simulator --seed 17                    replay one schedule, with its trace
    python -m simulator --from 0 --count 1000        run many
    python -m simulator --crash-points STRIDE        a crash at every STRIDE-th call of small schedules; of these by
                        --part 0/2                   every second one, from the first
    python -m simulator --no-faults                  a few jobs in which nothing goes wrong
    python -m simulator --mutations --part 0/2       break the protocol in every second way there is

What was run is told in lines, of JSON but for the trace; the exit status is 0 where nothing was found that should not
have been, 1 otherwise.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys

from simulator.crashes import POINTS, crash_points, small_world
from simulator.mutations import MUTATIONS, hunt
from simulator.schedule import run_many, run_schedule
from simulator.seams import simulated_system


def tell(**facts):
    print(json.dumps(facts), flush=True)


def replay(seed, after):
    list(run_many(range(after)))
    result = run_schedule(seed, trace=True)
    print("\n".join(result.lines or ()))
    print(f"seed {seed}: {result.faults}\n{result.breach or 'every invariant holds'}")
    return result.breach is None


def run(first, count):
    whole = True
    for result in run_many(range(first, first + count)):
        if result.breach is not None:
            whole = False
            tell(broken=f"seed {result.seed}: {result.breach}")
    tell(schedules=count)
    return whole


def crash(stride, part, parts):
    whole = True
    for how in POINTS:
        points = 0
        for where, result in crash_points(how, stride, part=part, parts=parts):
            points += 1
            if result.breach is not None:
                whole = False
                tell(broken=f"{how}, {where}: {result.breach}")
        tell(how=how, points=points)
    return whole


def run_without_faults():
    whole, statuses = True, set()
    for seed, (ranks, does) in enumerate(itertools.product((1, 2, 3, 4, 5), ("saves", "saves to a store"))):
        result = run_schedule(seed, faults=small_world(ranks, overwrite="", does=does))
        whole = whole and result.breach is None
        statuses.update(result.statuses)
    tell(statuses=sorted(statuses))
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
    parser = argparse.ArgumentParser(prog="python -m simulator", description=__doc__)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--after", type=int, default=0, metavar="COUNT", help="others to run before --seed")
    parser.add_argument("--no-faults", action="store_true")
    parser.add_argument("--from", dest="first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--crash-points", type=int, metavar="STRIDE")
    parser.add_argument("--mutations", action="store_true")
    parser.add_argument("--part", default="0/1", metavar="NUMBER/PARTS")
    args = parser.parse_args()
    part, parts = map(int, args.part.split("/"))
    with simulated_system():
        if args.seed is not None:
            whole = replay(args.seed, args.after)
        elif args.mutations:
            whole = break_on_purpose(part, parts)
        elif args.no_faults:
            whole = run_without_faults()
        elif args.crash_points:
            whole = crash(args.crash_points, part, parts)
        else:
            whole = run(args.first, args.count)
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
