"""A loop of reinforcement learning: two FSDP2 trainer ranks, and two processes that generate with their weights.

    python examples/rl_sync.py                              # weights travel through shared memory
    python examples/rl_sync.py --transport directory        # or through a directory of versions

This starts everything and looks on: ``torchrun`` with the trainer, two rollout processes which belong to no group, and
again one of these, which it kills on the way. For each version of the weights the rollout processes generate a few
sequences, which are rewarded for how many of their tokens are in the first half of the vocabulary; the trainer learns
from them (REINFORCE) and publishes the next version. The one that was killed starts again and asks for the version that
it died with: by then two newer ones are kept, and this one only because it is pinned. It goes on from there with the
newest.

A rollout process doesn't wait for weights: a thread of it looks for a new version (`poll`) and brings it aside
(`fetch`), while the process goes on generating with what it has; between two batches it puts it in place (`commit`).

It ends with status 0 only if all of this held: each process saw each version that it should have, in order; for each
version the logits of a fixed text are, bit for bit, the same in the trainer and in each rollout process; every version
differs from the one before; versions were fetched while the process generated. It takes less than a minute and a half
on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

LIMIT_S = 85.0
VERSIONS = range(1, 7)
PINNED = 2
"""What the second rollout process has when it is killed, and asks for when it is back."""
ALONE = range(3, 5)
"""The versions for which there is only the first."""
TRAINERS, ROLLOUTS = 2, 2
VOCABULARY, PROMPTS, PROMPT, NEW = 64, 8, 4, 12


# both sides ------------------------------------------------------------------------------------------------------


def make_model() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)  # the same sums in the same order, on both sides
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=None,  # nothing ends early
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def transport_of(options: argparse.Namespace) -> Any:
    import holdfast

    place = options.out / "sync"
    if options.transport == "directory":
        return holdfast.sync.DirectoryTransport(place)
    return holdfast.sync.SharedMemoryTransport(place)


def digest_of_logits(model: Any) -> str:
    """What the model says of a fixed text: equal for equal weights only."""
    import torch

    text = torch.arange(3 * 16).reshape(3, 16) * 7 % VOCABULARY
    with torch.no_grad():
        logits = model(input_ids=text).logits
    return hashlib.sha256(logits.contiguous().numpy().tobytes()).hexdigest()


def note(out: Path, who: str, **fields: Any) -> None:
    with (out / f"{who}.jsonl").open("a") as file:
        file.write(json.dumps(fields) + "\n")


def notes(out: Path, who: str) -> list[dict[str, Any]]:
    path = out / f"{who}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def sequences_file(out: Path, version: int, rollout: int) -> Path:
    return out / f"sequences-{version}-{rollout}.pt"


def wait_for(there: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not there():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come within {LIMIT_S:g} s")
        time.sleep(0.01)


# the trainer -----------------------------------------------------------------------------------------------------


def train(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    import holdfast

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = make_model()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # Kept in host memory (or in the directory), so that rollout processes come for them when they like.
    with holdfast.sync.Publisher(transport_of(options), bypass_cpu=False, keep_versions=2) as publisher:
        for version in VERSIONS:
            publisher.publish(model.state_dict(), version, timeout=LIMIT_S, meta={"step": version})
            if version == PINNED:
                publisher.pin(version)
            digest = digest_of_logits(model)
            if rank == 0:
                note(options.out, "trainer", version=version, logits=digest, kept=list(publisher.versions))
            sequences, reward = sequences_of(options.out, version)
            loss = learn(model, optimizer, sequences[rank::TRAINERS], reward[rank::TRAINERS], reward.mean())
            if rank == 0:
                print(f"trainer:   version {version}, mean reward {reward.mean():.3f}, loss {loss:+.3f}", flush=True)
        wait_for((options.out / "all-received").exists, "the last rollout process")
    dist.destroy_process_group()


def sequences_of(out: Path, version: int) -> tuple[Any, Any]:
    """What those that are alive have generated with ``version``, and the reward of each sequence."""
    import torch

    generating = range(1 if version in ALONE else ROLLOUTS)
    files = [sequences_file(out, version, rollout) for rollout in generating]
    wait_for(lambda: all(file.exists() for file in files), f"sequences of version {version}")
    sequences = torch.cat([torch.load(file, weights_only=True) for file in files])
    return sequences, (sequences[:, PROMPT:] < VOCABULARY // 2).float().mean(dim=1)


def learn(model: Any, optimizer: Any, sequences: Any, reward: Any, baseline: Any) -> float:
    """One step of REINFORCE."""
    logits = model(input_ids=sequences[:, :-1]).logits[:, PROMPT - 1 :]
    chosen = logits.log_softmax(dim=-1).gather(2, sequences[:, PROMPT:, None]).squeeze(2).sum(dim=1)
    loss = -((reward - baseline) * chosen).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


# a rollout process -----------------------------------------------------------------------------------------------


class Prefetch(threading.Thread):
    """Brings each new version aside, while its process generates; `receiver.fetched` then says which."""

    def __init__(self, receiver: Any) -> None:
        super().__init__(daemon=True)
        self.receiver = receiver
        self.began = 0.0
        """When the last fetch began."""
        self.error: Exception | None = None
        self.ended = threading.Event()

    def run(self) -> None:
        try:
            while not self.ended.wait(0.005):
                if self.receiver.fetched is None and self.receiver.poll() is not None:
                    self.began = time.monotonic()
                    self.receiver.fetch(timeout=LIMIT_S)
        except Exception as error:  # noqa: BLE001 - raised by the thread that generates
            self.error = error

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.receiver.cancel()
        self.join(10.0)


def roll_out(options: argparse.Namespace) -> None:
    import holdfast

    model, me = make_model(), f"rollout {options.rollout}"
    with holdfast.sync.Receiver(transport_of(options), into=model) as receiver:
        version = receiver.receive(version=options.join_at, timeout=LIMIT_S)
        note_version(options, model, receiver, ahead=False)
        with Prefetch(receiver) as prefetch:
            while True:
                sequences = generate(model, 1_000 * version + options.rollout)
                print(f"{me}: version {version}, generated {sequences[0, PROMPT:].tolist()}", flush=True)
                hand_in(sequences, sequences_file(options.out, version, options.rollout))
                if version == VERSIONS[-1]:
                    break
                began, batches = time.monotonic(), 0
                while receiver.fetched is None:  # go on with the weights there are, until there are others
                    if prefetch.error is not None:
                        raise prefetch.error
                    if time.monotonic() > began + LIMIT_S:
                        raise TimeoutError(f"nothing newer than version {version} came within {LIMIT_S:g} s")
                    generate(model, batches)
                    batches += 1
                generated_until = time.monotonic()
                version = receiver.commit()  # between two batches nobody reads the weights
                note_version(options, model, receiver, ahead=began < prefetch.began < generated_until)
                stats = receiver.stats
                assert stats is not None
                print(
                    f"{me}: fetched version {version} in {stats.fetch_s * 1e3:.1f} ms while it generated {batches} "
                    f"batches, committed in {(stats.commit_s or 0.0) * 1e3:.1f} ms",
                    flush=True,
                )


def note_version(options: argparse.Namespace, model: Any, receiver: Any, *, ahead: bool) -> None:
    """Note what this process has now. ahead: it was fetched while the process generated."""
    assert not receiver.dirty
    assert receiver.meta["step"] == receiver.version
    logits = digest_of_logits(model)
    note(options.out, f"rollout-{options.rollout}", version=receiver.version, logits=logits, ahead=ahead)


def generate(model: Any, seed: int) -> Any:
    import torch

    torch.manual_seed(seed)
    prompts = torch.randint(VOCABULARY, (PROMPTS, PROMPT))
    return model.generate(
        input_ids=prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=NEW,
        do_sample=True,
        pad_token_id=0,
    )


def hand_in(sequences: Any, file: Path) -> None:
    import torch

    torch.save(sequences, file.with_suffix(".part"))
    file.with_suffix(".part").replace(file)


# who starts all this, and looks on -------------------------------------------------------------------------------


class Fleet:
    """The processes; none outlives this one's `with` block."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.deadline = time.monotonic() + LIMIT_S
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.running.values():
            process.terminate()  # torchrun ends its ranks, which lead sessions of their own
        for process in self.running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5.0)
            process.kill()
            process.wait()

    def start(self, name: str, role: str, *more: str, launcher: tuple[str, ...] = ()) -> None:
        own = (__file__, "--role", role, "--transport", self.options.transport, "--out", str(self.options.out))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        self.running[name] = subprocess.Popen([sys.executable, *launcher, *own, *more], env=environment)

    def wait(self, there: Callable[[], bool], what: str) -> None:
        """Until ``there()``; everybody must live so long."""
        while not there():
            for name, process in self.running.items():
                if process.poll() not in (None, 0):
                    raise RuntimeError(f"{name} ended with status {process.returncode} before {what}")
            if time.monotonic() > self.deadline:
                raise TimeoutError(f"{what} did not come within {LIMIT_S:g} s")
            time.sleep(0.02)

    def kill(self, name: str) -> None:
        process = self.running.pop(name)
        process.kill()
        process.wait()


def run(options: argparse.Namespace) -> None:
    out, last = options.out, ROLLOUTS - 1
    with Fleet(options) as fleet:
        launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={TRAINERS}")
        fleet.start("trainer", "trainer", launcher=launcher)
        for rollout in range(ROLLOUTS):
            fleet.start(f"rollout {rollout}", "rollout", "--rollout", str(rollout))
        fleet.wait(sequences_file(out, PINNED, last).exists, f"version {PINNED} at rollout {last}")
        fleet.kill(f"rollout {last}")
        print(f"rollout {last}: killed with version {PINNED}", flush=True)
        fleet.wait(sequences_file(out, ALONE[-1], 0).exists, f"version {ALONE[-1]} at rollout 0")
        print(f"rollout {last}: starts again, asks for version {PINNED}", flush=True)
        fleet.start(f"rollout {last}", "rollout", "--rollout", str(last), "--join-at", str(PINNED))
        for rollout in range(ROLLOUTS):
            process = fleet.running[f"rollout {rollout}"]
            fleet.wait(lambda process=process: process.poll() == 0, f"the end of rollout {rollout}")  # type: ignore[misc]
        (out / "all-received").touch()
        fleet.wait(lambda: fleet.running["trainer"].poll() == 0, "the end of the trainer")


def check(out: Path) -> None:
    """Everything that this is to show."""
    trained = notes(out, "trainer")
    logits = {row["version"]: row["logits"] for row in trained}
    expect(list(logits) == list(VERSIONS), "the trainer has published every version once")
    expect(len(set(logits.values())) == len(VERSIONS), "every version differs from the others")
    seen = [[row["version"] for row in notes(out, f"rollout-{rollout}")] for rollout in range(ROLLOUTS)]
    expect(seen[0] == list(VERSIONS), f"rollout 0 saw every version: {seen[0]}")
    # It may have gone on a little before it was killed.
    again = len(seen[1]) - seen[1][::-1].index(PINNED) - 1 if PINNED in seen[1] else 0
    before, after = seen[1][:again], seen[1][again:]
    expect(before[:PINNED] == list(range(1, PINNED + 1)), f"rollout 1 saw every version until it was killed: {before}")
    rejoined = after[:1] == [PINNED] and after[-1:] == [VERSIONS[-1]] and after == sorted(set(after))
    expect(rejoined, f"rollout 1 came back at version {PINNED} and caught up: {after}")
    kept = {row["version"]: row["kept"] for row in trained}[ALONE[-1]]
    expect(kept == [PINNED, *ALONE], f"version {PINNED} was kept for it, beside the newest two: {kept}")
    received = [row for rollout in range(ROLLOUTS) for row in notes(out, f"rollout-{rollout}")]
    equal = all(row["logits"] == logits[row["version"]] for row in received)
    expect(equal, "at every version, logits are the same bits on both sides")
    ahead = sum(row["ahead"] for row in received)
    expect(ahead >= len(VERSIONS) - 1, f"{ahead} versions were fetched while the process generated")


def expect(held: bool, what: str) -> None:  # noqa: FBT001
    print(f"{'ok  ' if held else 'FAIL'} {what}", flush=True)
    if not held:
        raise AssertionError(what)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--transport", choices=("shared_memory", "directory"), default="shared_memory")
    parser.add_argument("--out", type=Path, help="where to keep what the processes noted; a temporary directory else")
    parser.add_argument("--role", choices=("trainer", "rollout"), help=argparse.SUPPRESS)
    parser.add_argument("--rollout", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--join-at", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role is not None:
        {"trainer": train, "rollout": roll_out}[options.role](options)
        return 0
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rl-sync-") as temporary:
        options.out = options.out or Path(temporary)
        options.out.mkdir(parents=True, exist_ok=True)
        if any(options.out.iterdir()):
            parser.error(f"--out {options.out} is not empty: give a new directory")
        try:
            run(options)
            check(options.out)
        except (AssertionError, RuntimeError, TimeoutError) as error:
            print(f"failed: {error}", file=sys.stderr)
            return 1
    print(f"all of it held, in {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
