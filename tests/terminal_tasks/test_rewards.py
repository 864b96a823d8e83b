"""What the verifiers give: 1 for the oracle, 0 for nothing, and for wrong answers of each obvious kind what they are worth."""

import json
import os
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from staged import Staged

from compactionrl.terminal_tasks import GRADES, KINDS, TerminalTask, instances, make_task

ANSWERED = [task for task in instances(grades=["easy"]) if task.draft.verify == "answers"]


@pytest.mark.parametrize("task", [*instances(), *instances("train", ["medium"], seed=1)], ids=lambda task: task.name)
def test_the_oracle_gets_all_and_nothing_gets_nothing(task: TerminalTask, tmp_path: Path) -> None:
    staged = Staged(task, tmp_path)
    assert staged.reward() == 0.0
    staged.solve()
    assert staged.reward() == 1.0


class TestAnswers:
    """answer.txt, whatever the kind."""

    @pytest.fixture(params=ANSWERED, ids=lambda task: task.kind)
    def staged(self, request: pytest.FixtureRequest, tmp_path: Path) -> Staged:
        self.right: dict[str, str] = request.param.draft.expected
        return Staged(request.param, tmp_path)

    def lines(self) -> list[str]:
        return [f"{name}: {value}" for name, value in self.right.items()]

    def test_every_right_line_counts_alike(self, staged: Staged) -> None:
        lines = self.lines()
        for count in range(len(lines) + 1):
            assert staged.answer("\n".join(lines[:count])) == pytest.approx(count / len(lines), abs=1e-4)

    def test_order_case_and_spaces_do_not_matter(self, staged: Staged) -> None:
        shown = [f"  {line.replace(': ', ' :   ')}".replace(",", " ,") for line in reversed(self.lines())]
        names = {name.lower() for name in self.right}
        assert staged.answer("\n\n".join(shown) + "\n\n") == 1.0
        assert len(names) == len(self.right)

    def test_values_of_other_names_are_wrong(self, staged: Staged) -> None:
        names, values = list(self.right), list(self.right.values())
        turned = "\n".join(f"{name}: {value}" for name, value in zip(names, values[1:] + values[:1], strict=True))
        assert staged.answer(turned) == 0.0

    def test_several_values_for_a_name_are_worth_nothing(self, staged: Staged) -> None:
        first = next(iter(self.right))
        assert staged.answer("\n".join([*self.lines(), f"{first}: another"])) == 0.0
        assert staged.answer("\n".join([*self.lines(), self.lines()[0]])) == 0.0
        everything = " ".join(self.right.values())
        assert staged.answer("\n".join(f"{name}: {everything}" for name in self.right)) == 0.0

    def test_lines_that_were_not_asked_for_are_worth_nothing(self, staged: Staged) -> None:
        assert staged.answer("\n".join([*self.lines(), "step 99: something"])) == 0.0
        assert staged.answer("\n".join(["I found this:", *self.lines()])) == 0.0

    def test_all_that_there_is_to_read_is_worth_nothing(self, staged: Staged) -> None:
        text = "\n".join(file.read_text() for file in sorted(staged.app.rglob("*")) if file.is_file())
        assert staged.answer(text) == 0.0
        assert staged.answer(f"{text}\n" + "\n".join(self.lines())) == 0.0

    def test_what_is_no_text_file_is_worth_nothing(self, staged: Staged, tmp_path: Path) -> None:
        answer = staged.app / "answer.txt"
        assert staged.answer("") == 0.0
        answer.write_bytes("\n".join(self.lines()).encode() + b"\n\xff\xfe")
        assert staged.reward() == 0.0
        answer.write_text("\n".join(self.lines()) + "\n" * 2_000_000)
        assert staged.reward() == 0.0
        elsewhere = tmp_path / "elsewhere.txt"
        elsewhere.write_text("\n".join(self.lines()))
        for make in (
            lambda: answer.mkdir(),
            lambda: os.mkfifo(answer),
            lambda: answer.symlink_to("/dev/zero"),
            lambda: answer.symlink_to(elsewhere),
        ):
            shutil.rmtree(answer) if answer.is_dir() else answer.unlink()
            make()
            assert staged.reward() == 0.0


NAIVE = {
    "clocks are taken as they are": ("log-forensics", r"- skew\[host\]", "", 0.0),
    "an id's first start is taken": ("log-forensics", r"max\(\(entry", "min((entry", 0.5),
    "tickets that were refused count": (
        "config-archaeology",
        r"DONE = \[",
        r'DONE = [re.compile(r"\\w+ on (\\d+) (\\w+)\\."),',
        0.9,
    ),
    "no ticket counts": ("config-archaeology", r"done = \{number", "done = {} and {number", 0.0),
    "nothing is rolled back": ("config-archaeology", r"line, value = before\[match\[1\]\]", "continue", 0.9),
    "tickets count in the order of their numbers": (
        "config-archaeology",
        r"key=lambda each: done\[each\]",
        "key=lambda each: each",
        0.9,
    ),
    "later tickets count": ("config-archaeology", r"if done\[each\] <= day\(asked\)", "", 0.9),
    "settings keep their old names": (
        "config-archaeology",
        r"newest = dict\(.*\)\n",
        "newest: dict[str, str] = {}\n",
        0.9,
    ),
    "a last always holds the same": ("stock-ledger", r"max\(each", "min(each", 0.5),
    "lasts are crates": ("stock-ledger", r'if move\["unit"\] == "lasts" else 1', "* 0 + 1 if True else 1", 0.0),
    "corrections are left out": ("stock-ledger", r"moves\[match\[1\]\] = .*", "pass", 0.5),
    "what was struck out counts": ("stock-ledger", r"del moves\[match\[1\]\]", "pass", 0.5),
    "withdrawn statements count": ("witnesses", r"withdrawn = set\(.*\)", "withdrawn = set()", 0.5),
    "withdrawals are never cancelled": ("witnesses", r"withdrawn -= .*", "", 0.5),
    "checks are always taken alike": ("data-repair", r"modulus = moduli.get\(number, modulus\)", "modulus = 101", 0.0),
    "annulled circulars count": ("pipeline-repair", r"if number not in annulled ", "", 0.9),
    "circulars count in the order of their numbers": (
        "pipeline-repair",
        r"MONTHS.index\(head\[3\]\), int\(head\[2\]\), head\[1\]",
        "head[1], 0, head[1]",
        0.9,
    ),
}
"""What is done wrong: the kind, what to change in its oracle, and the most that this may get in the hard grade."""
EVERYWHERE = {mistake for mistake in NAIVE if NAIVE[mistake][3] == 0}
EVERYWHERE |= {"tickets that were refused count", "nothing is rolled back", "later tickets count"}
"""Traps that every instance has, in every grade."""
TRAPS = [(mistake, grade) for mistake in NAIVE for grade in GRADES if grade == "hard" or mistake in EVERYWHERE]


@pytest.mark.parametrize(("mistake", "grade"), TRAPS)
def test_every_trap_costs(mistake: str, grade: str, tmp_path: Path) -> None:
    kind, pattern, replacement, most = NAIVE[mistake]
    staged = Staged(make_task(kind, grade, "heldout", 0), tmp_path)
    script = staged.root / "solution/solve.py"
    changed, count = re.subn(pattern, replacement, script.read_text())
    assert count == 1
    script.write_text(changed)
    staged.solve(check=False)
    assert staged.reward() <= most


@pytest.mark.parametrize("grade", GRADES)
def test_clocks_differ_by_more_than_the_time_between_two_starts(grade: str) -> None:
    """So a trace that does not correct them takes a wrong start at every step. (Starts are less than four minutes apart.)"""
    files = make_task("log-forensics", grade, "heldout", 0).draft.files
    notes = [" ".join(text.split()) for path, text in files.items() if path.startswith("hosts/")]
    told = r"From the first of May on the clock of \w+ has been (\d+) minutes and (\d+) seconds (fast|slow)"
    found = [re.findall(told, note) for note in notes]
    skews = sorted((60 * int(m) + int(s)) * (1 if way == "fast" else -1) for ((m, s, way),) in found)
    assert all(second - first > 240 for first, second in pairwise(skews))
    assert all(abs(skew) > 240 for skew in skews)


class TestDataRepair:
    @pytest.fixture
    def staged(self, tmp_path: Path) -> Staged:
        return Staged(make_task("data-repair", "medium", "heldout", 0), tmp_path)

    def expected(self, staged: Staged) -> tuple[dict[str, list[str]], set[int]]:
        right = json.loads((staged.root / "tests/expected.json").read_text())
        return {name: text.splitlines() for name, text in right["pages"].items()}, set(right["damaged"])

    def write(self, staged: Staged, pages: dict[str, list[str]]) -> float:
        for name, lines in pages.items():
            (staged.app / "book" / name).write_text("\n".join(lines) + "\n")
        return staged.reward()

    def test_damage_of_every_kind_is_done(self, staged: Staged) -> None:
        pages, damaged = self.expected(staged)
        kinds = set()
        for name, lines in pages.items():
            for right, shown in zip(lines, (staged.app / "book" / name).read_text().splitlines(), strict=True):
                differs = [a != b for a, b in zip(right.split(","), shown.split(","), strict=True)]
                assert any(differs) == (right[0].isdigit() and int(right.split(",")[0]) in damaged)
                kinds.add((tuple(differs), "?" in shown)) if any(differs) else None
        lost = {((False, True, False, False, False), True), ((False, False, True, True, False), True)}
        lost |= {((False, False, True, False, False), True), ((False, False, False, True, False), True)}
        assert lost <= kinds
        assert any(not marked for _, marked in kinds)

    def test_half_of_the_rows_is_half_of_the_reward(self, staged: Staged) -> None:
        pages, damaged = self.expected(staged)
        half = sorted(damaged)[: len(damaged) // 2]
        for name, lines in pages.items():
            shown = (staged.app / "book" / name).read_text().splitlines()
            for at, line in enumerate(lines):
                if line[0].isdigit() and int(line.split(",")[0]) in half:
                    shown[at] = line
            pages[name] = shown
        assert self.write(staged, pages) == 0.5

    def test_spoiled_rows_cost(self, staged: Staged) -> None:
        pages, damaged = self.expected(staged)
        page = pages["page-01.csv"]
        at = next(n for n in range(1, len(page)) if int(page[n].split(",")[0]) not in damaged)
        page[at] = page[at][:-1] + ("1" if page[at][-1] != "1" else "2")
        assert self.write(staged, pages) == pytest.approx(1 - 1 / len(damaged), abs=1e-4)

    def test_dropping_damaged_rows_is_worth_nothing(self, staged: Staged) -> None:
        pages, damaged = self.expected(staged)
        kept = {
            name: [line for line in lines if not (line[0].isdigit() and int(line.split(",")[0]) in damaged)]
            for name, lines in pages.items()
        }
        assert self.write(staged, kept) == 0.0

    def test_zeros_and_empty_pages_are_worth_nothing(self, staged: Staged) -> None:
        for file in staged.app.glob("book/*.csv"):
            file.write_text(file.read_text().replace("?", "0"))
        assert staged.reward() == 0.0
        for file in staged.app.glob("book/*.csv"):
            file.write_text("")
        assert staged.reward() == 0.0
        shutil.rmtree(staged.app / "book")
        assert staged.reward() == 0.0


class TestPipelineRepair:
    @pytest.fixture
    def staged(self, tmp_path: Path) -> Staged:
        return Staged(make_task("pipeline-repair", "medium", "heldout", 0), tmp_path)

    @pytest.mark.parametrize(
        "body",
        [
            "return values",
            "return []",
            "raise SystemExit",
            "while True: pass",
            "print('result stage_01 [[1]]')",
            "1 / 0",
            "__import__('os').kill(__import__('os').getppid(), 9)",
        ],
    )
    def test_the_same_for_every_stage_is_worth_nothing(self, staged: Staged, body: str) -> None:
        self.quick(staged)
        for file in staged.app.glob("stages/stage_*.py"):
            file.write_text(f"def run(values):\n    {body}\n")
        assert staged.reward() == 0.0

    def test_repeating_the_sample_is_worth_nothing(self, staged: Staged) -> None:
        """Right for the sample, by looking its result up, and for nothing else."""
        staged.solve()
        for file in staged.app.glob("stages/stage_*.py"):
            sample = json.loads((staged.app / f"samples/{file.stem}.json").read_text())["values"]
            right = file.read_text().replace("def run", "def right")
            file.write_text(f"{right}\nKNOWN = right({sample})\ndef run(values):\n    return list(KNOWN)\n")
        assert staged.reward() == 0.0

    def test_spoiled_stages_cost(self, staged: Staged) -> None:
        right = json.loads((staged.root / "tests/expected.json").read_text())
        staged.solve()
        whole = next(name for name in right["inputs"] if name not in right["broken"])
        (staged.app / f"stages/{whole}.py").write_text("def run(values):\n    return values\n")
        assert staged.reward() == pytest.approx(1 - 1 / len(right["broken"]), abs=1e-4)
        (staged.app / f"stages/{right['broken'][0]}.py").unlink()
        assert staged.reward() == pytest.approx(1 - 2 / len(right["broken"]), abs=1e-4)

    def test_a_stage_that_hangs_costs_what_follows_it(self, staged: Staged) -> None:
        self.quick(staged)
        right = json.loads((staged.root / "tests/expected.json").read_text())
        staged.solve()
        (staged.app / f"stages/{max(right['inputs'])}.py").write_text(
            "def run(values):\n    while True:\n        pass\n"
        )
        assert staged.reward() == pytest.approx(1 - 1 / len(right["broken"]), abs=1e-4)

    def test_a_stage_that_ends_the_process_costs_itself(self, staged: Staged) -> None:
        right = json.loads((staged.root / "tests/expected.json").read_text())
        staged.solve()
        (staged.app / f"stages/{min(right['broken'])}.py").write_text("raise SystemExit\n")
        assert staged.reward() == pytest.approx(1 - 1 / len(right["broken"]), abs=1e-4)

    @pytest.mark.parametrize("grade", GRADES)
    def test_the_run_stops_at_the_first_wrong_stage(self, grade: str, tmp_path: Path) -> None:
        """What `run.py` says is what the verifier thinks."""
        staged = Staged(make_task("pipeline-repair", grade, "heldout", 0), tmp_path)
        broken = set(json.loads((staged.root / "tests/expected.json").read_text())["broken"])
        command = [sys.executable, "-B", staged.app / "run.py"]
        shown = subprocess.run(command, capture_output=True, text=True)
        assert shown.returncode == 1
        assert min(broken) in shown.stderr
        staged.solve()
        shown = subprocess.run(command, capture_output=True, text=True)
        assert shown.returncode == 0
        assert shown.stdout.count("right") == len(list(staged.app.glob("samples/*.json")))

    @staticmethod
    def quick(staged: Staged) -> None:
        file = staged.root / "tests/verify.py"
        file.write_text(file.read_text().replace("SECONDS = 20", "SECONDS = 1"))


class TestRefactoring:
    @pytest.fixture
    def staged(self, tmp_path: Path) -> Staged:
        staged = Staged(make_task("refactoring", "medium", "heldout", 0), tmp_path)
        self.right = json.loads((staged.root / "tests/expected.json").read_text())
        return staged

    def renamed(self) -> dict[str, str]:
        """New name -> old one."""
        return {each["function"]: each["gone"][0] for each in self.right["accepted"] if each["gone"]}

    def module(self, staged: Staged, name: str) -> Path:
        return staged.app / f"harbour/{name}.py"

    def test_a_package_that_prints_something_else_is_worth_nothing(self, staged: Staged) -> None:
        staged.solve()
        main = self.module(staged, "__main__")
        main.write_text(main.read_text().replace("int(sys.argv[1])", "1 + int(sys.argv[1])"))
        assert staged.reward() == 0.0

    def test_a_definition_without_its_uses_is_worth_nothing(self, staged: Staged) -> None:
        for change in self.right["accepted"]:
            if change["gone"]:
                file = self.module(staged, change["module"])
                file.write_text(file.read_text().replace(f"def {change['gone'][0]}(", f"def {change['function']}("))
        assert staged.reward() == 0.0

    def test_an_alias_for_the_old_name_costs_the_renaming(self, staged: Staged) -> None:
        staged.solve()
        new, old = next(iter(self.renamed().items()))
        change = next(each for each in self.right["accepted"] if each["function"] == new)
        with self.module(staged, change["module"]).open("a") as file:
            file.write(f"\n\n{old} = {new}\n")
        assert staged.reward() == pytest.approx(1 - 1 / len(self.right["accepted"]), abs=1e-4)

    def test_leaving_the_function_in_its_old_module_costs_the_move(self, staged: Staged) -> None:
        staged.solve()
        change = next(each for each in self.right["accepted"] if each["gone_from"])
        (old,) = change["gone_from"]
        with self.module(staged, old).open("a") as file:
            file.write(f"\n\nfrom harbour.{change['module']} import {change['function']}\n")
        assert staged.reward() == pytest.approx(1 - 1 / len(self.right["accepted"]), abs=1e-4)

    def test_a_change_that_was_refused_costs(self, staged: Staged) -> None:
        staged.solve()
        other = self.right["others"][0]
        for file in staged.app.glob("harbour/*.py"):
            file.write_text(re.sub(rf"\b{other['function']}\b", "quite_another", file.read_text()))
        assert staged.reward() == pytest.approx(1 - 1 / len(self.right["accepted"]), abs=1e-4)

    def test_a_function_that_catches_everything_is_not_the_one(self, staged: Staged) -> None:
        """Both old and new parameter names through **arguments: no renaming."""
        staged.solve()
        change = next(each for each in self.right["accepted"] if each["keyword_only"])
        file = self.module(staged, change["module"])
        first, second = change["parameters"]
        file.write_text(
            re.sub(
                rf"def {change['function']}\(.*\)",
                f"def {change['function']}({first}, *, {second}=0)",
                file.read_text(),
            )
        )
        assert staged.reward() == pytest.approx(1 - 1 / len(self.right["accepted"]), abs=1e-4)

    def test_no_package_is_worth_nothing(self, staged: Staged) -> None:
        shutil.rmtree(staged.app / "harbour")
        assert staged.reward() == 0.0

    def test_printing_what_is_expected_does_not_make_a_change(self, staged: Staged) -> None:
        """The recorded output alone, without a package: the changes are missing."""
        printed = self.run(staged, *next(iter(self.right["output"])).split())
        shutil.rmtree(staged.app / "harbour")
        (staged.app / "harbour").mkdir()
        self.module(staged, "__init__").write_text("")
        self.module(staged, "__main__").write_text(f"print({printed!r})\n")
        assert staged.reward() == 0.0

    @staticmethod
    def run(staged: Staged, *numbers: str) -> str:
        command = [sys.executable, "-B", "-m", "harbour", *numbers]
        return subprocess.run(command, cwd=staged.app, capture_output=True, text=True, check=True).stdout

    def test_the_oracle_s_package_prints_what_the_old_one_printed(self, staged: Staged) -> None:
        pairs = [("3", "4"), ("0", "0"), ("-7", "12"), ("123456", "99")]
        before = [self.run(staged, *pair) for pair in pairs]
        staged.solve()
        assert [self.run(staged, *pair) for pair in pairs] == before


class TestSealedLetters:
    @pytest.fixture
    def staged(self, tmp_path: Path) -> Staged:
        return Staged(make_task("sealed-letters", "easy", "heldout", 0), tmp_path)

    def test_letters_open_with_their_words_alone(self, staged: Staged) -> None:
        first = re.search(r"the letter under the (\w+)", (staged.root / "solution/instruction.md").read_text())
        assert first
        said = self.unseal(staged, first[1], "Heron", "Lindau")
        assert said == "These are not its words."
        assert self.unseal(staged, "no-such-seal", "a", "b") == "There is no letter under the seal no-such-seal."
        assert self.unseal(staged).startswith("python3 unseal.py SEAL")

    def test_no_part_of_the_testament_can_be_read_without_opening(self, staged: Staged) -> None:
        right = json.loads((staged.root / "tests/expected.json").read_text())
        text = "\n".join(file.read_text() for file in staged.app.rglob("*") if file.is_file())
        assert not [word for word in right.values() if word in text]

    @staticmethod
    def unseal(staged: Staged, *words: str) -> str:
        return subprocess.run(
            [sys.executable, staged.app / "unseal.py", *words], capture_output=True, text=True
        ).stderr.strip()


def test_tests_do_not_listen_to_what_was_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of the agent's in the place of one of the standard library's, or variables of its own, change nothing."""
    task = make_task("witnesses", "easy", "heldout", 0)
    staged = Staged(task, tmp_path)
    for folder in (staged.app, tmp_path / "left"):
        folder.mkdir(exist_ok=True)
        (folder / "json.py").write_text("raise SystemExit\n")
        (folder / "sitecustomize.py").write_text("raise SystemExit\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "left"))
    monkeypatch.chdir(staged.app)
    assert staged.reward() == 0.0
    assert staged.answer("\n".join(f"{name}: {value}" for name, value in task.draft.expected.items())) == 1.0


def test_every_kind_is_looked_at() -> None:
    assert {task.kind for task in ANSWERED} | {"data-repair", "pipeline-repair", "refactoring"} == set(KINDS)
