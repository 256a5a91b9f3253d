"""Holdfast, its peers and the machine's limit, side by side in one run: `make bench`, or ``holdfast bench``.

The *runner* (torch-free) starts each contender as a *worker* process of its own, in its own environment where versions
clash, and lets them take turns: one works while all others sleep. What a worker measures is a *sample*; the report is
made from samples alone, so that figures can be looked at again without measuring again.

Guarantees: medians of rounds in which all take turns; every save is durable when its clock stops (what does not fsync
by itself is fsynced, within its time); what was loaded is compared with what was saved; every wait has a deadline.
"""
