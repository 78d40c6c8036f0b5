"""The journal, its file, and the replay.

Without these a journal could silently drop or reorder decisions while threads append, and a replayed plan
could differ from the one that was made.
"""

from __future__ import annotations

import sys
from threading import Barrier, Thread
from typing import TYPE_CHECKING

import pytest

from vram_magic.journal import Journal, Record, StepTaken
from vram_magic.policy import ModelState, Request, Snapshot, plan

pytestmark = pytest.mark.cpu_only("no device")

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MiB = 2**20


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def note(n: int = 0) -> Record:
    return Record(f"caller {n}", need_bytes=n, had_bytes=0, freed_bytes=0)


def decision(need: int) -> Record:
    snapshot = Snapshot(100, 5, (ModelState("llm", 0, 1, (3, 4)), ModelState("größe", 2, 0, (9,), spared="in use")))
    request = Request(need, rank=1, prefer=("llm",), asked_by="tts called")
    made = plan(snapshot, request)
    left = tuple(StepTaken(s.model, s.blocks, s.bytes, s.stage, s.reason, 1.5) for s in made.steps)
    return Record("tts called", need, 5, made.freed_bytes, left, made.spared, "", snapshot, request, made, 17.25)


def filled(*records: Record) -> Journal:
    journal = Journal()
    for record in records:
        journal.append(record)
    return journal


def test_a_journal_is_a_sequence_of_records() -> None:
    records = [note(n) for n in range(5)]
    journal = filled(*records)
    assert list(journal) == records
    assert list(reversed(journal)) == records[::-1]
    assert (journal[0], journal[-1], journal[-2:]) == (records[0], records[4], records[3:])
    assert records[2] in journal
    assert len(journal) == 5
    assert repr(journal) == "<Journal of 5 records>"
    with pytest.raises(IndexError):
        journal[5]


def test_the_oldest_record_goes_when_it_is_full() -> None:
    journal = Journal(maxlen=2)
    for n in range(4):
        journal.append(note(n))
    assert list(map(str, journal)) == list(map(str, (note(2), note(3))))


def test_a_record_knows_when_it_was_made() -> None:
    assert note().time <= note().time
    assert note().time > 1.7e9  # seconds, not a clock that starts with the machine


def test_a_record_reads_as_a_line() -> None:
    left = (
        StepTaken("tts", 14, 922 * MiB, "pass 1", "tier 1", 35.2),
        StepTaken("asr", 0, MiB, "workspace", "idle"),
    )
    record = Record("llm called", 1229 * MiB, 307 * MiB, 923 * MiB, left, (("asr", "in use"),), "as planned")
    assert str(record) == (
        "llm called: needed 1.2 GiB, had 307.0 MiB; left: "
        "tts 14 blocks 922.0 MiB (pass 1, 35 ms), asr 1.0 MiB (workspace, 0 ms); as planned\n"
        "  spared: asr (in use)"
    )
    assert str(Record("", 1, 0, 0)) == "unknown: needed 1 B, had 0 B; left: nothing"


def test_the_file_gives_back_equal_records(tmp_path: Path) -> None:
    journal = filled(decision(8), note(1), decision(99))
    journal.to_jsonl(tmp_path / "journal.jsonl")
    assert Journal.read(tmp_path / "journal.jsonl") == list(journal)


def test_replay_gives_the_plans_that_were_recorded(tmp_path: Path) -> None:
    records = [decision(need) for need in (0, 5, 6, 9, 12, 13, 99)]
    filled(note(1), *records).to_jsonl(tmp_path / "journal.jsonl")
    assert Journal.replay(tmp_path / "journal.jsonl") == [record.plan for record in records]


def test_writing_replaces_the_old_file_and_leaves_no_draft(tmp_path: Path) -> None:
    file = tmp_path / "journal.jsonl"
    file.write_text("old")
    filled(note(1)).to_jsonl(str(file))
    assert len(Journal.read(str(file))) == 1
    assert list(tmp_path.iterdir()) == [file]


def test_a_failed_write_keeps_the_old_file_and_leaves_no_draft(tmp_path: Path) -> None:
    file = tmp_path / "journal.jsonl"
    file.write_text("old")
    unwritable = Record("x", 0, 0, 0, reason=object())  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        filled(note(1), unwritable).to_jsonl(file)
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("line", ["{", "[]", "{}", '{"asked_by": 1}', "null"])
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "journal.jsonl"
    filled(note(1)).to_jsonl(file)
    file.write_text(f"{file.read_text()}\n{line}\n")
    with pytest.raises(ValueError, match="line 3: not a journal record"):
        Journal.read(file)


@pytest.mark.usefixtures("hasty_threads")
def test_threads_append_while_others_read() -> None:
    journal, threads, each = Journal(maxlen=100_000), 6, 300
    start, failures = Barrier(threads + 2), []

    def write(n: int) -> None:
        start.wait()
        for i in range(each):
            journal.append(note(n * each + i))

    def read() -> None:
        start.wait()
        try:
            while len(list(journal)) < threads * each:
                assert len(journal[-3:]) <= 3
        except RuntimeError as error:  # what iterating the deque itself would raise
            failures.append(error)

    workers = [Thread(target=write, args=(n,)) for n in range(threads)] + [Thread(target=read) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert not failures
    seen = [record.need_bytes for record in journal]
    assert sorted(seen) == list(range(threads * each))
    for n in range(threads):  # each thread's own records stay in order
        mine = [i for i in seen if i // each == n]
        assert mine == sorted(mine)
