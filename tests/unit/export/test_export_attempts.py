"""Attempts whose files several ranks write: published whole or not at all, settled after a crash, and verified."""

from __future__ import annotations

import itertools
import os

import msgspec
import pytest
from _export import PREWRITTEN, export, export_on_ranks, make_export
from _protocol import Killed, Stoppable, make_plan, run_ranks, save, start

from holdfast.catalog.catalog import Catalog
from holdfast.catalog.listing import list_root
from holdfast.catalog.retention import Keep
from holdfast.commit.attempt import AttemptAborted, AttemptPublished
from holdfast.commit.publish import make_attempt
from holdfast.commit.recovery import RecoveryReport
from holdfast.coordination.board import LocalBoard
from holdfast.errors import CheckpointExists, CheckpointNotFound, ConfigError, HoldfastError, StorageError
from holdfast.format.manifest import (
    MANIFEST_NAME,
    PLAN_NAME,
    FilePart,
    ManifestReport,
    decode_attempt_plan,
    decode_report,
    encode_attempt_plan,
    encode_manifest,
    encode_report,
    parts_digest,
    parts_in,
    report_name,
)
from holdfast.format.sealed import xxh3_128
from holdfast.loader.checkpoint import verify_source
from holdfast.loader.sources.holdfast import open_holdfast
from holdfast.loader.sources.open import newest_step, open_source
from holdfast.storage.entries import hidden_name, read_manifest
from holdfast.storage.local import LocalStorage
from holdfast.testing.memory_storage import MemoryStorage
from holdfast.testing.parts import SharedSample

MB = 1 << 20
WORLD = 3
SIZES = {"model-00001-of-00002.safetensors": 3 * MB + 555, "model-00002-of-00002.safetensors": 2 * MB, "small": 99}
REPORTS = [report_name(rank) for rank in range(WORLD)]


@pytest.fixture(scope="module")
def sample():
    sample = SharedSample(SIZES, WORLD, seed=11)
    assert sum(len({part.name for part in own}) for own in sample.parts) > len(SIZES), "a file is to be shared"
    yield sample
    sample.close()


@pytest.fixture
def storage(tmp_path):
    return LocalStorage(tmp_path)


def check_export(storage, name, sample, prewritten=PREWRITTEN):
    """All that the ranks wrote is at ``name``, and nothing else, and every byte of it verifies."""
    directory = storage.path(name)
    sample.check_files(directory)
    for file, data in prewritten.items():
        with open(os.path.join(directory, file), "rb") as written:
            assert written.read() == data
    below = {file.partition("/")[0] for file in prewritten}
    assert set(os.listdir(directory)) == {MANIFEST_NAME, *REPORTS[: len(sample.parts)], *sample.contents, *below}
    report = verify_source(open_source(directory, exports=True))
    assert (report.ok, report.problems) == (True, ())
    assert report.nbytes == sum(map(len, sample.contents.values()))
    assert report.files == len(sample.contents)


def test_an_export_of_several_ranks_is_published_whole(storage, sample):
    outcomes = export_on_ranks([storage] * WORLD, sample)
    assert [type(outcome) for outcome in outcomes] == [AttemptPublished] * WORLD
    assert storage.list_dir("") == ["hf-7"]
    check_export(storage, "hf-7", sample)
    manifest = read_manifest(storage, "hf-7")
    assert manifest.kind == "export"
    assert sum(line.nbytes for line in manifest.reports) == sum(SIZES.values())


def test_one_rank_alone_exports_the_same(storage):
    sample = SharedSample(SIZES, 1, seed=2)
    assert isinstance(export_on_ranks([storage], sample)[0], AttemptPublished)
    check_export(storage, "hf-7", sample)
    sample.close()


def test_a_rank_that_fails_leaves_nothing(storage, sample):
    def fail(rank):
        if rank == 1:
            raise StorageError("no space", path="/disk", errno=28)

    outcomes = export_on_ranks([storage] * WORLD, sample, fail=fail)
    assert all(isinstance(outcome, AttemptAborted) for outcome in outcomes)
    assert {outcome.reason.rank for outcome in outcomes} == {1}
    assert storage.list_dir("") == []


def test_a_rank_that_wrote_other_parts_than_planned_is_noticed(storage, sample):
    parts = [list(own) for own in sample.parts]
    one = next(rank for rank, own in enumerate(parts) if own)
    moved = parts[one].pop()
    parts[(one + 1) % WORLD].append(moved)
    outcomes = export_on_ranks([storage] * WORLD, sample, plan=make_export(parts))
    assert all(isinstance(outcome, AttemptAborted) and "reported" in outcome.reason.message for outcome in outcomes)
    assert storage.list_dir("") == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parts": [[FilePart("a", 0, MB, 2 * MB)], [], []]}, "bytes 1048576 to 2097152 of a are in no part"),
        ({"parts": [[FilePart("a", 0, MB, MB)], [FilePart("a", 0, MB, MB)], []]}, "in two parts"),
        ({"parts": [[FilePart(".a", 0, MB, MB)], [], []]}, "'.a' can't be"),
        ({"parts": [[FilePart("a/b", 0, MB, MB)], [], []]}, "'a/b' can't be"),
        ({"parts": [[FilePart("config.json", 0, MB, MB)], [], []]}, "'config.json' is there twice"),
        ({"parts": [[FilePart("x", 0, MB, MB)], [], []], "prewritten": {"x/y": b""}}, "'x' is there twice"),
        ({"prewritten": {"a/b/c": b""}}, "'a/b/c' can't be"),
        ({"prewritten": {".env": b""}}, "'.env' can't be"),
        ({"prewritten": {"a/../b": b""}}, "can't be"),
        ({"prewritten": {"/etc/x": b""}}, "can't be"),
        ({"prewritten": {"rank-00000.report": b""}}, "can't be"),
        ({"prewritten": {"holdfast.json": b""}}, "can't be"),
        ({"prewritten": {"lease-00000": b""}}, "can't be"),
        ({"prewritten": {"x": b"", "x/y": b""}}, "'x' is there twice"),
    ],
)
def test_what_can_not_be_an_export_is_refused_before_anything_is_made(storage, sample, changes, message):
    prewritten = changes.get("prewritten", PREWRITTEN)
    plan = make_export(changes.get("parts", sample.parts), prewritten)
    outcomes = export_on_ranks([storage] * WORLD, sample, plan=plan, prewritten=prewritten)
    assert all(isinstance(outcome, ConfigError) and message in str(outcome) for outcome in outcomes), outcomes
    assert storage.list_dir("") == []


def test_small_files_that_the_manifest_does_not_list_are_refused(storage, sample):
    outcomes = export_on_ranks([storage] * WORLD, sample, prewritten={**PREWRITTEN, "config.json": b"{ }"})
    assert all(isinstance(outcome, ConfigError) for outcome in outcomes)


def test_what_is_prewritten_survives_a_power_cut_from_the_beginning(sample):
    memory = MemoryStorage()
    plan = make_export(sample.parts)
    make_attempt(memory, plan, PREWRITTEN)
    memory.lose_unsynced(lambda _pending: 0)
    directory = memory.directory_of(plan.name, plan.attempt)
    assert memory.list_dir(directory) == sorted(
        [PLAN_NAME, "additional_chat_templates", "config.json", "tokenizer.json"]
    )
    for name, data in PREWRITTEN.items():
        assert memory.read_file(f"{directory}/{name}", max_bytes=100) == data


# after a crash ---------------------------------------------------------------------------------------------------


def export_until_killed(storage, sample):
    """What each rank says of an export whose job is killed as a whole at some operation of ``storage``."""
    boards, plan = LocalBoard.of_world(2), make_export(sample.parts)

    def run(rank):
        try:
            return export(storage, boards[rank], sample, plan)
        except Killed:
            for board in boards:
                board.close()
            return Killed()
        except HoldfastError as error:
            return error

    return run_ranks(run, 2)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_killed_at_every_operation(tmp_path, after):
    sample = SharedSample({"a": MB + 300, "b": 50}, 2, seed=1)
    rolled_forward = published = 0
    for k in itertools.count(1):
        (tmp_path / str(k)).mkdir()
        real = LocalStorage(tmp_path / str(k))
        stoppable = Stoppable(real, k, after=after)
        said = export_until_killed(stoppable, sample)
        report = start(real)
        assert report.left == ()
        rolled_forward += bool(report.rolled_forward)
        assert [entry for entry in real.list_dir("") if entry.startswith(".")] == []
        if real.list_dir(""):
            published += 1
            check_export(real, "hf-7", sample)
        assert start(real) == RecoveryReport()
        if any(isinstance(outcome, AttemptPublished) for outcome in said):
            assert real.list_dir("") == ["hf-7"]
        if not stoppable.dead:
            assert all(isinstance(outcome, AttemptPublished) for outcome in said)
            break
    assert rolled_forward
    assert published > rolled_forward
    sample.close()


@pytest.fixture
def left(storage, sample):
    """The directory of an attempt all of whose reports are durable, and whose ranks are gone."""
    plan = make_export(sample.parts)
    export_on_ranks([storage] * WORLD, sample, plan=plan, settle=False)
    directory = hidden_name("hf-7", plan.attempt, "incomplete")
    assert storage.list_dir("") == [directory]
    return directory


def is_given_up(storage):
    """Whether the next start removes what is left."""
    found = start(storage)
    assert found.left == ()
    assert storage.list_dir("") == list(found.rolled_forward)
    return not found.rolled_forward


def test_what_every_rank_has_written_is_rolled_forward(storage, sample, left):
    assert start(storage).rolled_forward == ("hf-7",)
    check_export(storage, "hf-7", sample)


def test_what_was_about_to_be_published_is_rolled_forward_without_its_plan(storage, sample, left):
    finish(storage, left)
    assert start(storage).rolled_forward == ("hf-7",)
    check_export(storage, "hf-7", sample)


def finish(storage, directory):
    """Write the manifest as the coordinator does at the end, and remove the plan."""
    plan = decode_attempt_plan(storage.read_file(f"{directory}/{PLAN_NAME}", max_bytes=MB), path="p")
    lines = []
    for rank, name in enumerate(REPORTS):
        data = storage.read_file(f"{directory}/{name}", max_bytes=MB)
        files = decode_report(data, path=name).files
        nbytes = sum(file.size for file in files)
        lines.append(ManifestReport(rank, name, len(data), xxh3_128(data), nbytes, parts_digest(parts_in(files))))
    manifest = msgspec.structs.replace(plan.manifest, reports=tuple(lines))
    storage.write_file(f"{directory}/{MANIFEST_NAME}", encode_manifest(manifest))
    storage.unlink(f"{directory}/{PLAN_NAME}")


@pytest.mark.parametrize("rank", range(WORLD))
def test_without_one_report_it_is_given_up(storage, left, rank):
    storage.unlink(f"{left}/{REPORTS[rank]}")
    assert is_given_up(storage)


def all_parts(sample):
    return [part for own in sample.parts for part in own]


def flip(path, offset):
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("at", ["first", "last"])
def test_a_damaged_part_is_found(storage, sample, left, number, at):
    part = all_parts(sample)[number % len(all_parts(sample))]
    flip(storage.path(f"{left}/{part.name}"), part.offset if at == "first" else part.end - 1)
    assert is_given_up(storage)


@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize("name", SIZES)
def test_a_file_of_another_size_is_found(storage, left, name, change):
    os.truncate(storage.path(f"{left}/{name}"), SIZES[name] + change)
    assert is_given_up(storage)


@pytest.mark.parametrize("name", [*SIZES, *PREWRITTEN])
def test_a_missing_file_is_found(storage, left, name):
    os.unlink(storage.path(f"{left}/{name}"))
    assert is_given_up(storage)


@pytest.mark.parametrize("name", PREWRITTEN)
def test_a_damaged_small_file_is_found(storage, left, name):
    flip(storage.path(f"{left}/{name}"), 0)
    assert is_given_up(storage)


def rewrite_report(storage, directory, rank, change):
    """A report that says what ``change`` makes of its files, and is whole."""
    path = f"{directory}/{REPORTS[rank]}"
    report = decode_report(storage.read_file(path, max_bytes=MB), path=path)
    storage.unlink(path)
    storage.write_file(path, encode_report(msgspec.structs.replace(report, files=tuple(change(list(report.files))))))
    return report


@pytest.mark.parametrize("with_plan", [True, False], ids=["plan", "manifest"])
@pytest.mark.parametrize("case", ["missing", "twice"])
def test_reports_that_do_not_make_up_the_files_are_given_up(storage, sample, left, case, with_plan):
    shared = next(part for part in all_parts(sample) if not part.is_whole)
    owner = next(rank for rank, own in enumerate(sample.parts) if shared in own)
    found = []

    def take(files):
        found.extend(file for file in files if (file.name, file.offset) == (shared.name, shared.offset))
        return [file for file in files if file not in found]

    if case == "missing":
        rewrite_report(storage, left, owner, take)
    else:
        path = f"{left}/{REPORTS[owner]}"
        take(decode_report(storage.read_file(path, max_bytes=MB), path=path).files)
        rewrite_report(storage, left, (owner + 1) % WORLD, lambda files: [*files, *found])
    assert len(found) == 1
    if not with_plan:
        finish(storage, left)
    assert is_given_up(storage)


def test_a_plan_whose_parts_do_not_make_up_files_is_given_up(storage, sample, left):
    """It never begins like that; but nothing is published that isn't whole, whoever wrote the plan."""
    path = f"{left}/{PLAN_NAME}"
    plan = decode_attempt_plan(storage.read_file(path, max_bytes=MB), path=path)
    shared = next(part for part in all_parts(sample) if not part.is_whole)
    owner = next(rank for rank, own in enumerate(sample.parts) if shared in own)
    parts = tuple(tuple(part for part in own if part != shared) for own in plan.parts)
    storage.unlink(path)
    storage.write_file(path, encode_attempt_plan(msgspec.structs.replace(plan, parts=parts)))
    rewrite_report(
        storage,
        left,
        owner,
        lambda files: [file for file in files if (file.name, file.offset) != (shared.name, shared.offset)],
    )
    assert is_given_up(storage)


# verified --------------------------------------------------------------------------------------------------------


@pytest.fixture
def exported(storage, sample):
    assert isinstance(export_on_ranks([storage] * WORLD, sample)[0], AttemptPublished)
    return storage.path("hf-7")


def problems_of(directory):
    report = verify_source(open_source(directory, exports=True))
    assert report.ok == (not report.problems)
    return report.problems


@pytest.mark.parametrize("name", SIZES)
def test_damage_is_named_by_file_and_bytes(exported, name):
    last = SIZES[name] - 1
    for at in {0, last, min(MB, last)}:
        flip(os.path.join(exported, name), at)
        (problem,) = problems_of(exported)
        assert problem.path == os.path.join(exported, name)
        assert problem.byte_range[0] <= at < problem.byte_range[1]
        assert problem.byte_range[1] - problem.byte_range[0] <= MB
        flip(os.path.join(exported, name), at)
    assert problems_of(exported) == ()


def test_damage_beside_an_unreadable_report_is_found_too(exported, sample):
    # Two ranks with parts of one file: one's report is damaged, and so is a byte that the other has written.
    name = next(iter(SIZES))
    owners = sorted((part.offset, rank) for rank, own in enumerate(sample.parts) for part in own if part.name == name)
    one = owners[0][1]
    offset = next(at for at, rank in owners if rank != one)
    flip(os.path.join(exported, REPORTS[one]), 40)
    flip(os.path.join(exported, name), offset)
    found = {os.path.basename(problem.path): problem for problem in problems_of(exported)}
    assert set(found) == {REPORTS[one], name}
    assert found[name].byte_range[0] == offset


@pytest.mark.parametrize("name", [*SIZES, *PREWRITTEN, *REPORTS])
def test_a_file_that_is_gone_is_named(exported, name):
    os.unlink(os.path.join(exported, name))
    assert os.path.join(exported, name) in {problem.path for problem in problems_of(exported)}


@pytest.mark.parametrize("name", ["extra.bin", "additional_chat_templates/extra.jinja", ".metadata"])
def test_a_file_that_was_added_is_a_warning(exported, name):
    path = os.path.join(exported, name)
    with open(path, "w") as file:
        file.write("x")
    report = verify_source(open_source(exported, exports=True))
    assert report.ok
    assert [warning.path for warning in report.warnings] == [path]


@pytest.mark.parametrize("name", ["model-00009-of-00009.safetensors", "pytorch_model.bin", "adapter_model.safetensors"])
def test_added_weights_that_readers_may_take_are_damage(exported, name):
    path = os.path.join(exported, name)
    with open(path, "w") as file:
        file.write("x")
    assert [problem.path for problem in problems_of(exported)] == [path]


# kept apart from checkpoints -------------------------------------------------------------------------------------


@pytest.fixture
def mixed(storage, sample):
    """A root with checkpoints of steps 1 and 2, and newer exports, one of them under a checkpoint's kind of name."""
    for step in (1, 2):
        assert isinstance(save(storage, LocalBoard(), step, plan=make_plan(step, 1)), AttemptPublished)
    for name in ("hf-7", "step-7"):
        plan = make_export(sample.parts, name=name)
        assert isinstance(export_on_ranks([storage] * WORLD, sample, plan=plan)[0], AttemptPublished)
    return storage


def test_nobody_takes_an_export_for_a_checkpoint(mixed):
    keeper = Catalog(mixed, "step-{step}", None)
    assert keeper.candidates(None) == [(2, "step-2"), (1, "step-1")]
    assert keeper.latest() == 2
    with pytest.raises(CheckpointNotFound):
        keeper.candidates(7)
    assert newest_step(mixed.root).name == "step-2"
    assert open_source(mixed.root).step == 2
    with pytest.raises(ConfigError, match="is an export"):
        open_source(mixed.path("hf-7"))
    assert open_holdfast(mixed.path("hf-7")).tensors == {}


def test_retention_of_checkpoints_leaves_exports_alone_and_the_other_way_round(mixed):
    removed = []
    Catalog(mixed, "step-{step}", Keep(last=1)).apply_retention(2, removed.append)
    assert len(removed) == 1
    assert [name for name in mixed.list_dir("") if not name.startswith(".")] == ["hf-7", "step-2", "step-7"]
    exports = Catalog(mixed, "step-{step}", None, kind="export")
    assert exports.latest() == 7
    assert exports.candidates(7) == [(7, "step-7")]


def test_nothing_is_kept_for_a_run_that_went_on_from_its_step(mixed, sample):
    """It went on from the checkpoint of that step: retention of exports has no reason to keep the export."""
    keeper = Catalog(mixed, "hf-{step}", Keep(last=1), kind="export")
    keeper.resumed_from(7)
    extra, replaces = keeper.place(8, "hf-8", ())
    assert not replaces
    plan = make_export(sample.parts, step=8)
    assert isinstance(export_on_ranks([mixed] * WORLD, sample, plan=plan)[0], AttemptPublished)
    keeper.note_published(8, "hf-8", extra, resumable=False)
    removed = []
    keeper.apply_retention(8, removed.append)
    assert [name.split(".")[1] for name in removed] == ["hf-7"]
    assert not mixed.exists("hf-7")


def test_a_checkpoint_never_takes_the_place_of_an_export(mixed):
    keeper = Catalog(mixed, "step-{step}", None)
    with pytest.raises(CheckpointExists, match="not a checkpoint that Holdfast made"):
        keeper._may_replace(7, "step-7")


def test_a_listing_says_what_is_an_export(mixed):
    rows = {row.name: row for row in list_root(mixed.root).entries}
    assert {name: row.kind for name, row in rows.items()} == {
        "step-1": "checkpoint",
        "step-2": "checkpoint",
        "hf-7": "export",
        "step-7": "export",
    }
    assert {row.state for row in rows.values()} == {"published"}
    assert [row.name for row in rows.values() if row.latest] == ["step-2"]
    assert rows["hf-7"].step == 7
