"""Log forensics: a task is traced back from host to host through logs whose clocks disagree and whose task ids are reused.

To be carried over: how far each host's clock is off, and the id, host and true time reached so far.
"""

from __future__ import annotations

from dataclasses import dataclass

from compactionrl.environments.logbook import Draws
from compactionrl.terminal_tasks.task import Draft
from compactionrl.terminal_tasks.words import PEOPLE, TOWNS, among, codes, numbers

SIZES = {"easy": (5, 4, 45), "medium": (9, 8, 60), "hard": (14, 14, 80)}
"""Hosts, steps of the trace, lines of other things per host and day."""

HOSTS = (
    "auk", "bittern", "crane", "dunlin", "eider", "finch", "grebe", "heron", "ibis", "jay", "kite", "lark", "merlin", "osprey",
)  # fmt: skip
DAYS = 2
DAY = 86_400
STARTS = (
    "runner: task {task} started for task {parent} of {host}",
    "spool: begin {task} <- {host}/{parent}",
    "job event=start id={task} parent={parent}@{host}",
)
ROOTS = (
    "runner: task {task} started by {account} from {address}",
    "spool: begin {task} <- login {account} {address}",
    "job event=start id={task} login={account}@{address}",
)
NOISE = (
    "cron: {n} of {m} timers due, next in {n} s",
    "disk: volume {task} at {n} percent, {m} inodes free",
    "runner: task {task} ended with status {s}",
    "spool: end {task} after {m} s",
    "job event=stop id={task} status={s}",
    "net: {n} packets to {host} resent",
    "auth: key {task} of {account} renewed",
    "mem: {m} pages reclaimed in {n} ms",
)
README = """\
# Logs

`logs/HOST/DAY.log` is what a host wrote on that day of May 2031, each line with the time of the host's own clock.
No clock is right: `hosts/HOST.txt` says among other things how far it is off. True time is what the clock would
show if it were right.

A task runs on one host. Its start is logged there, together with what started it: a task of another host, or a
person who logged in. Hosts log in three dialects; they mean the same.

Task ids are short and are used again and again, on every host. The start that belongs to a task seen at some true
time is the last start of that id on that host before that time. A task starts less than four minutes after the task
that started it did.
"""


@dataclass(frozen=True)
class Start:
    """`time`: true, in seconds since the first day's midnight. `cause`: what started it, a task's host and id or a login."""

    host: str
    task: str
    time: int
    cause: tuple[str, str]
    root: bool


def make(grade: str, draws: Draws) -> Draft:
    hosts, steps, noise = SIZES[grade]
    return _Writer(draws, draws.sample(HOSTS, hosts), steps, noise).draft()


class _Writer:
    def __init__(self, draws: Draws, hosts: list[str], steps: int, noise: int) -> None:
        self.draws, self.hosts, self.steps, self.noise = draws, hosts, steps, noise
        self.skew = {host: minutes * 60 + draws.between(0, 20) for host, minutes in self._minutes().items()}
        self.dialect = {host: draws.between(0, 2) for host in hosts}
        self.ids = iter(codes(draws, 40 * steps, 4))
        self.starts: list[Start] = []

    def _minutes(self) -> dict[str, int]:
        """Clocks that are 5 minutes and more apart, so that a trace that takes them as they are goes astray at every step."""
        steps = self.draws.sample([n for n in range(-9, 10) if n], len(self.hosts))
        return {host: 5 * step for host, step in zip(self.hosts, steps, strict=True)}

    def draft(self) -> Draft:
        # Early on the second day: the trace may pass midnight.
        seen = DAY + self.draws.between(600, 4 * 3600)
        trace = self._chain(seen - self.draws.between(20, 190), self.steps, decoys=True)
        first, root = trace[0], trace[-1]
        expected = {f"step {n}": f"{start.host} {start.task} {clock(start.time)}" for n, start in enumerate(trace, 1)}
        expected |= {"account": root.cause[0], "address": root.cause[1]}
        return Draft(
            instruction=instruction(first, seen, self.steps),
            files={"README.md": README, **self._notes(), **self._logs()},
            expected=expected,
            solve="log_forensics",
        )

    def _chain(self, time: int, length: int, decoys: bool = False, task: str = "", host: str = "") -> list[Start]:
        """The start of a task at `time`, then what started it, and so on: `length` starts, the last one by a person."""
        host, task = host or self.draws.choice(self.hosts), task or next(self.ids)
        chain = []
        for left in reversed(range(length)):
            if left:
                parent = (self.draws.choice([each for each in self.hosts if each != host]), next(self.ids))
            else:
                parent = (self.draws.choice(PEOPLE).lower(), address(self.draws))
            chain.append(Start(host, task, time, parent, root=not left))
            if decoys:
                self._reuse(host, task, time)
            if left:
                host, task = parent
                time -= self.draws.between(20, 190)
        self.starts += chain
        return chain

    def _reuse(self, host: str, task: str, time: int) -> None:
        """The same id on the same host, earlier and later: both sides of what a wrong clock would take for the start."""
        earlier = time - self.draws.between(1200, 4 * 3600)
        later = time + self.draws.between(200, 290)
        for other in (earlier, later, later + self.draws.between(1200, 4 * 3600)):
            self._chain(other, self.draws.between(1, 3), task=task, host=host)

    def _notes(self) -> dict[str, str]:
        return {f"hosts/{host}.txt": self._note(host) for host in self.hosts}

    def _note(self, host: str) -> str:
        draws, title = self.draws, host.capitalize()
        sentences = [
            f"{title} stands in {draws.choice(TOWNS)} and is looked after by {draws.choice(PEOPLE)}.",
            f"Until the repair in April its clock was {off(draws.between(-2000, 2000))}.",
            f"From the first of May on the clock of {host} has been {off(self.skew[host])}.",
            f"The clock of {draws.choice(self.hosts)} is no better, they say.",
        ]
        return among(draws, sentences, 9)

    def _logs(self) -> dict[str, str]:
        lines: dict[str, list[tuple[int, str]]] = {}
        for host in self.hosts:
            own = [(start.time + self.skew[host], self._text(start)) for start in self.starts if start.host == host]
            for day in range(DAYS):
                own += [(day * DAY + self.draws.between(0, DAY - 1), self._noise()) for _ in range(self.noise)]
            for time, text in sorted(own):
                date = f"2031-05-{11 + time // DAY:02}"
                lines.setdefault(f"logs/{host}/{date}.log", []).append((time, f"{clock(time)} {text}"))
        return {path: "\n".join(text for _, text in entries) + "\n" for path, entries in lines.items()}

    def _text(self, start: Start) -> str:
        form = (ROOTS if start.root else STARTS)[self.dialect[start.host]]
        if start.root:
            return form.format(task=start.task, account=start.cause[0], address=start.cause[1])
        return form.format(task=start.task, host=start.cause[0], parent=start.cause[1])

    def _noise(self) -> str:
        draws = self.draws
        (task,) = codes(draws, 1, 4)
        n, m = numbers(draws, 2, 1, 99)
        host, account = draws.choice(self.hosts), draws.choice(PEOPLE).lower()
        return draws.choice(NOISE).format(task=task, n=n, m=m * 37, host=host, account=account, s=draws.between(0, 2))


def clock(seconds: int) -> str:
    """Time of day."""
    return f"{seconds // 3600 % 24:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def off(seconds: int) -> str:
    minutes, rest = divmod(abs(seconds), 60)
    return f"{minutes} minutes and {rest} seconds {'fast' if seconds > 0 else 'slow'}"


def address(draws: Draws) -> str:
    return f"10.{draws.between(0, 255)}.{draws.between(0, 255)}.{draws.between(1, 254)}"


def instruction(first: Start, seen: int, steps: int) -> str:
    return f"""\
# Who sent it?

On {11 + seen // DAY} May 2031 at {clock(seen)} true time a file left the network through host `{first.host}`. The
task that sent it was `{first.task}` of that host. It had been started by a task of another host, that one by
another, and so on for {steps} tasks in all; the last of these was started by a person. Trace them back.
`/app/README.md` says how the logs under `/app/logs` are to be read.

Write `/app/answer.txt`, one line for each of these names, and no other line:

```
step 1: HOST TASK TRUE-TIME-OF-ITS-START
...
step {steps}: HOST TASK TRUE-TIME-OF-ITS-START
account: WHO-STARTED-THE-LAST-ONE
address: FROM-WHERE
```

Step 1 is the task named above, step {steps} the one that the person started. Times are times of day such as
`03:04:05`.
"""
