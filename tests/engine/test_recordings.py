"""What programs send, and on which streams, stays what it is: recordings of fifty programs, in `recordings/`.

Streams, events and NCCL run only on GPUs, and most changes are made where there is none. So every collective, every
switch of the stream, every event and every wait of these programs is written down here, on a stand-in for the streams
(stand_in_streams.py, recorder.py), and compared.

**What is recorded changes only together with a run on a GPU.** A wait that is missing here is a race there, and a wait
too many is time. If a change is meant to alter a recording, read the difference, run the tests and benchmarks that need
a GPU before and after (`make test-gpu`, `make bench-gpu`), write the recordings anew, and commit both together:

    PYTHONPATH=tests/support python tests/engine/test_recordings.py --write [PROGRAM ...]

The second section of a recording is the control exchange: what hosts say to each other, by connections of their own.
No stream is in it, so it may change without a GPU:

    PYTHONPATH=tests/support python tests/engine/test_recordings.py --write-control [PROGRAM ...]

writes that section anew and leaves the first as it is; if the first differs, it is refused.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from recorded_programs import PROGRAMS, run_program
from recorder import Recording
from worker_pool import WorkerPool

FOLDER = Path(__file__).parent / "recordings"
DATA, CONTROL = "== Collectives, streams, events and waits ==", "== The control exchange =="
ADVICE = "What is recorded changes only together with a run on a GPU: see the top of tests/engine/test_recordings.py"
CONTROL_ALONE = (
    "Only the control exchange differs: if that is meant, write it with --write-control (see the top of the file)"
)


def path_of(program: str) -> Path:
    return FOLDER / f"{program}.txt"


def text_of(program: str, recording: Recording) -> str:
    """Return what the file of a program holds."""
    sections = [(DATA, recording.data), (CONTROL, recording.control)]
    body = "\n".join(f"{title}\n{text}" for title, text in sections)
    return f"{program}: {PROGRAMS[program].__doc__}\n\n{body}"


def data_of(text: str) -> str:
    return text.partition(CONTROL)[0]


def difference(committed: str, now: str, program: str) -> str:
    lines = difflib.unified_diff(
        committed.splitlines(keepends=True),
        now.splitlines(keepends=True),
        f"tests/engine/recordings/{program}.txt",
        "this run",
        n=5,
    )
    return "".join(lines)


def recording_of(pool: WorkerPool, program: str) -> Recording:
    """Run a program, check that the ranks' calls fit together, and return rank 0's recording."""
    ranks = pool.run(run_program, program, timeout=60)
    for rank, recording in enumerate(ranks):
        assert not recording.problems, f"rank {rank}: {recording.problems}"
        order = "\n".join(difflib.unified_diff(ranks[0].collectives, recording.collectives, "rank 0", f"rank {rank}"))
        assert recording.collectives == ranks[0].collectives, f"the ranks issue other collectives:\n{order}"
    first, second = ranks
    assert [nbytes for _, nbytes in first.sent] == [nbytes for _, nbytes in second.received]
    assert [nbytes for _, nbytes in second.sent] == [nbytes for _, nbytes in first.received]
    return first


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_sends_and_waits_as_it_is_recorded(workers, program):
    now = text_of(program, recording_of(workers(2), program))
    committed = path_of(program).read_text()
    if now != committed:
        advice = CONTROL_ALONE if data_of(now) == data_of(committed) else ADVICE
        pytest.fail(f"{difference(committed, now, program)}\n{advice}", pytrace=False)


def test_every_recording_has_its_program():
    assert {path.stem for path in FOLDER.glob("*")} == set(PROGRAMS)


def write(programs: Sequence[str], *, control_alone: bool) -> int:
    """Write the recordings that differ, and return the exit status."""
    pool, refused, changed = WorkerPool(2), [], []
    FOLDER.mkdir(exist_ok=True)
    for program in programs:
        now = text_of(program, recording_of(pool, program))
        committed = path_of(program).read_text() if path_of(program).exists() else ""
        if now == committed:
            continue
        print(difference(committed, now, program))
        if data_of(now) != data_of(committed):
            if control_alone:
                refused.append(program)
                continue
            changed.append(program)
        path_of(program).write_text(now)
    if not control_alone and set(programs) == set(PROGRAMS):
        for path in FOLDER.glob("*"):
            if path.stem not in PROGRAMS:
                path.unlink()
    pool.close()
    if changed:
        print(f"Changed: {', '.join(changed)}. {ADVICE}")
    if refused:
        print(f"Not written, because more than the control exchange differs: {', '.join(refused)}. {ADVICE}")
    return 1 if refused else 0


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choice = parser.add_mutually_exclusive_group(required=True)  # nothing is written by accident
    choice.add_argument("--write", action="store_true", help="write the recordings anew")
    choice.add_argument("--write-control", action="store_true", help="write the sections of the control exchange anew")
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help="which ones; default: all")
    chosen = parser.parse_args(arguments)
    if unknown := set(chosen.programs) - set(PROGRAMS):
        parser.error(f"there are no programs {sorted(unknown)}; there are {', '.join(PROGRAMS)}")
    return write(chosen.programs or list(PROGRAMS), control_alone=chosen.write_control)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
