"""What goes wrong in one schedule: drawn once from its seed, but for odds that are asked for again and again."""

from __future__ import annotations

TRAVEL_S = 0.002
NETWORKS = 0.35
"""In how many schedules there is a network."""
KINDS = ("weights", "memory", "fill")
"""How a rank may fail to stage a version: its weights can't be had, a block can't be made, a copy fails."""


class Faults:
    """Every attribute is what one schedule does; see `draw`."""

    def __init__(self, rng):
        self.rng = rng
        self.active = True
        self.jobs = 1
        self.worlds = [1]
        self.keep = 2
        self.publishes = [3]
        self.pace_s = 0.05
        """Between two publishes, at most."""
        self.pins = 0.0
        self.starts = ["on"]
        """Where a job begins: "on" from the last number, "refused" below it, or "rewound" to below it."""
        self.stage = {}
        """(job, publish): (rank, how it fails)."""
        self.publisher_turns = {}
        """(job, rank): at which of its turns it is killed (None) or stopped for so many seconds."""
        self.receivers = 1
        self.receiver_turns = {}
        self.receiver_hands = ()
        """Receivers with a second thread, which commits, polls and cancels."""
        self.streams = 0.0
        self.again = 0.0
        """How often a version that is held is fetched once more."""
        self.spikes = 0.0
        self.cuts = ()
        """When a connection breaks."""
        self.rendezvous = 0.0
        self.board = 0.0
        self.closes = 0.5
        self.ties = 0.15
        """How often two names are published as one tensor, which is another layout."""
        self.damage = 0.0
        """How often a byte of a block is not what it was hashed as."""
        self.last_start = "on"
        self.network = ()
        """Receivers that bring versions over a network; where there are none, publishers serve their host alone."""
        self.fan_out = ()
        """Those of them that serve one another."""
        self.delta = None
        self.breaks = 0.0
        """How often a connection of bytes breaks, each time that some are sent."""
        self.lies = 0.0
        """How often a receiver that serves others sends other bytes than it has."""

    @property
    def calm(self):
        """Return True if nothing goes wrong with publishers: then nothing that receivers do may hold them up."""
        return not (self.publisher_turns or self.stage or self.rendezvous or self.board)

    @classmethod
    def draw(cls, rng):
        drawn = cls(rng)
        drawn.jobs = rng.choice((1, 1, 2, 2, 3))
        drawn.worlds = [rng.choice((1, 1, 2, 2, 3)) for _ in range(drawn.jobs)]
        drawn.keep = rng.choice((1, 1, 2))
        drawn.publishes = [rng.randint(1, 5) for _ in range(drawn.jobs)]
        drawn.pace_s = rng.choice((0.0, 0.02, 0.2, 1.0))
        drawn.pins = rng.choice((0.0, 0.0, 0.4))
        drawn.starts = ["on", *(rng.choice(("on", "refused", "rewound")) for _ in range(drawn.jobs - 1))]
        drawn.receivers = rng.choice((1, 1, 2, 2, 3, 4))
        drawn.receiver_hands = tuple(n for n in range(drawn.receivers) if rng.random() < 0.4)
        drawn.streams = rng.choice((0.0, 0.0, 0.3))
        drawn.again = rng.choice((0.0, 0.3))
        drawn.closes = rng.choice((0.0, 1.0))
        drawn.damage = rng.choice((0.0, 0.0, 0.0, 0.1))
        drawn.last_start = rng.choice(("on", "on", "rewound"))
        for number in range(drawn.receivers):
            if rng.random() < 0.6:
                drawn.receiver_turns[number] = drawn.turns(rng, 250)
        drawn.spikes = rng.choice((0.0, 0.0, 0.02))
        if rng.random() < 0.2:
            drawn.cuts = tuple(rng.random() * 2.0 for _ in range(rng.randint(1, 3)))
        if rng.random() < 0.65:
            drawn.draw_publishers(rng)
        if rng.random() < NETWORKS:
            drawn.draw_network(rng)
        return drawn

    def draw_network(self, rng):
        """Who brings versions over a network, and how that goes."""
        share = rng.choice((0.6, 1.0))
        self.network = tuple(n for n in range(self.receivers) if rng.random() < share)
        self.fan_out = self.network if rng.random() < 0.5 else ()
        self.delta = rng.choice((None, "values", "steps"))
        self.breaks = rng.choice((0.0, 0.0, 0.005))
        self.lies = rng.choice((0.0, 0.0, 0.2))

    def draw_publishers(self, rng):
        """What goes wrong with publishers, too."""
        for job in range(self.jobs):
            for publish in range(self.publishes[job]):
                if rng.random() < 0.12:
                    self.stage[job, publish] = rng.randrange(self.worlds[job]), rng.choice(KINDS)
            for rank in range(self.worlds[job]):
                if rng.random() < 0.35:
                    self.publisher_turns[job, rank] = self.turns(rng, 400)
        self.rendezvous = rng.choice((0.0, 0.0, 0.03))
        self.board = rng.choice((0.0, 0.0, 0.01))

    @staticmethod
    def turns(rng, most):
        """Return some turns, and what happens there: None for a kill, or seconds of a stop."""
        found = {}
        for _ in range(rng.randint(1, 3)):
            found[rng.randint(1, most)] = None if rng.random() < 0.3 else rng.choice((0.02, 0.3, 2.0, 6.0))
        return found

    # odds that are asked for again and again ----------------------------------------------------------------------

    def travel(self):
        """Return the seconds that a message takes."""
        rng = self.rng
        if self.active and self.spikes and rng.random() < self.spikes:
            return rng.random() * 1.5
        return rng.random() * TRAVEL_S

    def travel_of(self, process):
        """Return the seconds that a request to a board or a rendezvous takes."""
        return self.rng.random() * TRAVEL_S if self.calm and process.job is not None else self.travel()

    def breaks_now(self):
        """Return True if a connection breaks."""
        return self.active and self.rng.random() < self.breaks

    def lies_now(self, process):
        """Return True if what a process sends isn't what it has; to the end: others don't depend on it."""
        return process.receiver is not None and self.lies and self.rng.random() < self.lies

    def rendezvous_fails(self, process):
        if not (self.active and self.rendezvous and process.job is not None) or self.rng.random() > self.rendezvous:
            return None
        return self.rng.choice(("before", "after", "late"))

    def board_fails(self, process):
        if not (self.active and self.board and process.job is not None) or self.rng.random() > self.board:
            return None
        return self.rng.choice(("before", "after"))
