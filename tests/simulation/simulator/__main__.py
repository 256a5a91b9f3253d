"""Replay one schedule with its trace, or run many: ``python -m simulator --seed 17``, ``--from 0 --count 1000``."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from simulator.schedule import run_many, run_schedule
from simulator.seams import simulated_system


def main():
    parser = argparse.ArgumentParser(prog="python -m simulator", description=__doc__)
    parser.add_argument("--seed", type=int, help="replay this schedule, with a trace")
    parser.add_argument("--from", dest="first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    args = parser.parse_args()
    with simulated_system():
        if args.seed is not None:
            result = run_schedule(args.seed, trace=True)
            print("\n".join(result.lines or ()))
            print(f"seed {args.seed}: {result.faults}\n{result.breach or 'every invariant holds'}")
            return 1 if result.breach else 0
        began = time.perf_counter()
        broken, told = [], Counter()
        for result in run_many(range(args.first, args.first + args.count)):
            told.update(result.statuses)
            if result.breach is not None:
                broken.append(result)
                print(f"seed {result.seed}: {result.breach}"[:400], flush=True)
        took = time.perf_counter() - began
    print(f"{args.count} schedules in {took:.1f} s ({1000 * took / args.count:.2f} ms each), {len(broken)} broken")
    print(f"ranks were told: {dict(told)}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
