"""Starts the job of faults_job.py again and again, kills it, and judges what the next start finds.

A process of its own with torch imported and no threads, which forks the ranks: a start takes milliseconds instead of
seconds. Every kill is one line of JSON on the standard output.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import select
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch._dynamo  # what the first step of an optimizer imports: 300 ms, once here instead of in every rank
from faults_job import BETWEEN, STEPS, Job, Life, Truth, write_truth

import shardstep

_IMPORTED = (shardstep.shard, shardstep.save, shardstep.load)  # now, for the same reason

PATIENCE = 60.0  # seconds after which a job hangs: Gloo takes 5 times the group's 8 to connect with one that has died
LONGEST = 0.4  # seconds from the end of the loading to a kill at a random moment
LIVES = 12  # kills that one folder sees


@dataclass(frozen=True, slots=True)
class Verdict:
    """On one kill, by what the next start found."""

    kind: str  # of kill
    moment: str
    ranks: int
    asynchronous: bool
    lost: bool = False  # a checkpoint that was there is not
    incomplete: bool = False  # what was loaded is not what was saved
    hung: bool = False  # the ranks that were not killed, or the next start
    survivors: int = 0  # that raised
    seconds: float = 0.0  # from the kill until all had ended
    left: bool = False  # what the killed left was still there after the next save
    problem: str = ""


# -- one start ---------------------------------------------------------------------------------------------------------


class Start:
    """The ranks of one life, as processes."""

    def __init__(self, life: Life, truth: Truth, scratch: Path) -> None:
        self.life, self._scratch = life, scratch
        self.events: list[list[list[str]]] = [[] for _ in range(life.ranks)]
        self.hung = False
        self._rest = [b""] * life.ranks
        self._codes: dict[int, int] = {}
        meeting = scratch / f"meeting-{time.monotonic_ns()}"
        self._pipes, self.pids = [], []
        for rank in range(life.ranks):
            read, write = os.pipe()
            pid = os.fork()
            if pid == 0:
                _be_rank(Job(life, rank, truth, write), meeting, scratch / f"rank{rank}.log")
            os.close(write)
            self._pipes.append(read)
            self.pids.append(pid)

    def said(self, word: str) -> list[list[str]]:
        return [event for events in self.events for event in events if event[0] == word]

    def steps(self, word: str) -> list[int]:
        return [int(event[1]) for event in self.said(word)]

    def listen(self, seconds: float, until: str | None = None) -> bool:
        """Read what they tell: until every rank said `until`, or all have ended; False if time ran out before."""
        deadline = time.monotonic() + seconds
        while True:
            if until is not None and all(any(e[0] == until for e in events) for events in self.events):
                return True
            open_pipes = [pipe for pipe in self._pipes if pipe >= 0]
            if not open_pipes:
                return until is None
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            for pipe in select.select(open_pipes, [], [], left)[0]:
                self._read(self._pipes.index(pipe))

    def _read(self, rank: int) -> None:
        block = os.read(self._pipes[rank], 65536)
        if not block:
            os.close(self._pipes[rank])
            self._pipes[rank] = -1
        *lines, self._rest[rank] = (self._rest[rank] + block).split(b"\n")
        self.events[rank] += [line.decode().split(" ", 2) for line in lines]

    def kill(self, ranks: list[int]) -> None:
        for rank in ranks:
            os.kill(self.pids[rank], signal.SIGKILL)

    def finish(self) -> None:
        """Wait for all to end; whoever does not is noted, and killed."""
        if not self.listen(PATIENCE):
            self.hung = True
            self._dump_stacks()
            self.kill([rank for rank, pipe in enumerate(self._pipes) if pipe >= 0])
            self.listen(PATIENCE)
        for rank, pid in enumerate(self.pids):
            self._codes[rank] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def _dump_stacks(self) -> None:
        """Where those are that do not end, on the standard error."""
        for rank, pipe in enumerate(self._pipes):
            if pipe >= 0:
                os.kill(self.pids[rank], signal.SIGUSR1)
                time.sleep(0.5)
                sys.stderr.write(f"rank {rank} does not end:\n{(self._scratch / f'rank{rank}.log').read_text()}\n")

    @property
    def killed(self) -> list[int]:
        return [rank for rank, code in self._codes.items() if code == -signal.SIGKILL]

    @property
    def failed(self) -> list[int]:
        return [rank for rank, code in self._codes.items() if code == 1]

    def problems(self) -> str:
        return "; ".join(" ".join(event) for word in ("raised", "warned") for event in self.said(word))


def _be_rank(job: Job, meeting: Path, log: Path) -> None:
    """In the child, which never returns."""
    code = 1
    try:
        output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        faulthandler.register(signal.SIGUSR1, file=2)
        job.run(meeting)
        code = 0
    except BaseException as error:
        traceback.print_exc()
        job.tell("raised", type(error).__name__, str(error).replace("\n", " ")[:500])
    finally:
        os._exit(code)


# -- what is right -----------------------------------------------------------------------------------------------------


@dataclass
class Folder:
    """A folder of checkpoints, and what is known of it from outside."""

    path: Path
    keep: int | None
    done: int = 0  # the newest whose save returned, on any rank
    begun: int = 0  # the newest that was begun

    def learn(self, start: Start) -> None:
        self.done = max([self.done, *start.steps("done")])
        self.begun = max([self.begun, *start.steps("begins")])

    def judge(self, verdict: Verdict, start: Start) -> Verdict:
        """By a start that has loaded, or could not."""
        loaded = start.said("loaded")
        if len(loaded) < start.life.ranks:
            return replace(verdict, lost=not start.hung, hung=start.hung, problem=start.problems() or "silent")
        found = {int(step) for _, step, _ in loaded}
        wrong = len(found) > 1 or any(word != "right" for _, _, word in loaded) or max(found) > self.begun
        lost = min(found) < self.done or bool(start.said("warned"))
        return replace(
            verdict,
            lost=verdict.lost or lost,
            incomplete=verdict.incomplete or wrong,
            problem=start.problems() if lost or wrong else verdict.problem,
        )


def moment_of(start: Start, rank: int) -> str:
    events = [event[0] for event in start.events[rank] if event[0] in ("loaded", "begins", "done")]
    return "saving" if events and events[-1] == "begins" else "training"


# -- kills at random moments -------------------------------------------------------------------------------------------


class Runner:
    def __init__(self, scratch: Path, seed: int) -> None:
        self._scratch, self._random = scratch, random.Random(seed)
        scratch.mkdir(parents=True, exist_ok=True)
        self._truth: Truth = torch.load(_truth(scratch), weights_only=True)

    def random_kills(self, kills: int) -> Iterator[Verdict]:
        folder, lives = self._new_folder(), 0
        waiting: Verdict | None = None  # for the next start, which judges it
        while kills or waiting is not None:
            start = Start(self._random_life(folder), self._truth, self._scratch)
            is_there = start.listen(PATIENCE, until="loaded")
            if not is_there:
                start.finish()
            if waiting is not None:
                yield folder.judge(waiting, start)
                waiting = None
            if is_there and kills:
                waiting = self._kill(start)
                folder.learn(start)
                kills -= waiting is not None
                lives += 1
            else:
                start.kill(list(range(start.life.ranks)) if is_there else [])
                start.finish() if is_there else None
                lives = LIVES
            if waiting is None and (lives >= LIVES or folder.begun + 20 * BETWEEN > STEPS):
                shutil.rmtree(folder.path, ignore_errors=True)
                folder, lives = self._new_folder(), 0

    def _random_life(self, folder: Folder) -> Life:
        choose = self._random.choice
        return Life(folder.path, choose([1, 2, 2]), choose([False, True]), folder.keep)

    def _kill(self, start: Start) -> Verdict | None:
        """None if it had ended before."""
        everyone = list(range(start.life.ranks))
        victims = everyone if self._random.random() < 0.3 else [self._random.choice(everyone)]
        start.listen(self._random.uniform(0, LONGEST))
        start.kill(victims)
        begin = time.monotonic()
        start.finish()
        if not start.killed:
            return None
        kind = "SIGKILL to all ranks" if len(victims) == start.life.ranks else "SIGKILL to one of two ranks"
        if start.life.ranks == 1:
            kind = "SIGKILL to the only rank"
        moment = moment_of(start, victims[0])
        return Verdict(
            kind,
            moment,
            start.life.ranks,
            start.life.asynchronous,
            hung=start.hung,
            survivors=len(start.failed),
            seconds=time.monotonic() - begin,
            problem="a rank that was not killed did not end" if start.hung else "",
        )

    def _new_folder(self) -> Folder:
        number = self._random.getrandbits(32)
        return Folder(self._scratch / f"run-{number:08x}", self._random.choice([None, 2, 3]))

    # -- kills at every file operation ---------------------------------------------------------------------------------

    def every_operation(self, ranks: int, asynchronous: bool, victim: int, keep: int | None) -> Iterator[Verdict]:
        """One kill for each operation of a save that replaces or prunes an older checkpoint."""
        ready = Folder(self._scratch / f"ready-{ranks}-{asynchronous}-{victim}-{keep}", keep)
        start = Start(Life(ready.path, ranks, False, keep, saves=2), self._truth, self._scratch)
        start.finish()
        ready.learn(start)
        assert ready.done == 2 * BETWEEN, start.problems()
        fatal = 0
        while True:
            folder = replace(ready, path=self._scratch / f"sweep-{self._random.getrandbits(32):08x}")
            shutil.copytree(ready.path, folder.path)
            life = Life(folder.path, ranks, asynchronous, keep, saves=1, fatal=fatal, victim=victim)
            start = Start(life, self._truth, self._scratch)
            start.finish()
            folder.learn(start)
            if not start.killed and not start.hung:
                assert folder.done == 3 * BETWEEN, start.problems()
                shutil.rmtree(folder.path)
                return  # it has no more operations than that
            yield self._after_operation(folder, start, fatal)
            shutil.rmtree(folder.path)
            fatal += 1

    def _after_operation(self, folder: Folder, start: Start, fatal: int) -> Verdict:
        life = start.life
        moment = next((" ".join(event[1:]) for event in start.said("killed")), "?")
        kind = f"at every file operation, {'asynchronous' if life.asynchronous else 'synchronous'}"
        kind += f", rank {life.victim} of {life.ranks}, {'same name' if life.keep is None else 'pruning'}"
        verdict = Verdict(kind, moment, life.ranks, life.asynchronous, hung=start.hung, survivors=len(start.failed))
        again = Start(replace(life, ranks=1 + fatal % 2, saves=1, fatal=None), self._truth, self._scratch)
        again.finish()
        verdict = folder.judge(verdict, again)
        names = sorted(path.name for path in folder.path.iterdir())
        most = 1 if folder.keep is None else folder.keep
        ended = len(again.said("ended")) == again.life.ranks
        if not ended or len(names) > most or any(name.startswith(".") for name in names):
            problem = f"after the next save: {', '.join(names)}; {again.problems()}"
            verdict = replace(verdict, left=ended, lost=verdict.lost or not ended, problem=problem)
        return replace(verdict, hung=verdict.hung or again.hung)


def _truth(scratch: Path) -> Path:
    path = scratch / "truth.pt"
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            write_truth(path)
            code = 0
        finally:
            os._exit(code)
    if os.waitpid(pid, 0)[1]:
        raise RuntimeError("the plain optimizer could not be run")
    return path


SWEEPS = [  # ranks, asynchronous, victim, keep
    (ranks, asynchronous, victim, keep)
    for keep in (2, None)
    for ranks, victim in ((1, 0), (2, 0), (2, 1))
    for asynchronous in (False, True)
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=0, help="at random moments")
    parser.add_argument("--sweeps", type=int, nargs="*", default=[], help=f"which of {len(SWEEPS)}")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    runner = Runner(arguments.folder, arguments.seed)
    for verdict in runner.random_kills(arguments.kills):
        print(json.dumps(asdict(verdict)), flush=True)
    for number in arguments.sweeps:
        for verdict in runner.every_operation(*SWEEPS[number]):
            print(json.dumps(asdict(verdict)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
