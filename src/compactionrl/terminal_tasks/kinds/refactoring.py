"""Refactoring: a package of many modules, with changes that were proposed in one place and decided in others.

To be carried over: which proposals were accepted and how they were amended, and which modules have been changed for each.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

from compactionrl.environments.logbook import Draws
from compactionrl.terminal_tasks.task import Draft
from compactionrl.terminal_tasks.words import PEOPLE, among, chatter, date

SIZES = {"easy": (8, 4, 2), "medium": (16, 8, 4), "hard": (28, 14, 7)}
"""Modules, changes that were accepted, changes that were not."""

MODULES = (
    "arrivals", "ballast", "beacons", "buoys", "cables", "cellars", "charts", "claims", "coal", "convoys", "customs", "ferries",
    "fisheries", "gates", "hoists", "insurance", "keels", "ledgers", "lifeboats", "mails", "manifests", "masts", "moorings",
    "passengers", "permits", "quarantine", "repairs", "salvage", "signals", "stores", "surveys", "tugs", "victuals", "wharves",
    "yards", "zones", "archive", "barges", "cranes", "depots", "escorts", "floats", "grain",
)  # fmt: skip
FIRST = (
    "berth", "quay", "crane", "lamp", "rope", "pilot", "tide", "cargo", "crew", "toll", "anchor", "dock", "mast", "keel", "hull",
    "sail", "net", "salt", "coal", "mail",
)  # fmt: skip
SECOND = ("fee", "rent", "dues", "levy", "charge", "share", "rate", "bonus")
PARAMETERS = ("tonnage", "days", "metres", "crates", "level", "berths", "hours", "barrels", "hands", "lanterns")
NEW_PARAMETERS = ("weight", "nights", "length", "boxes", "storey", "places", "watches", "casks", "sailors", "lights")
STYLES = ("from", "module", "package", "getattr")
MODULUS = 9973


@dataclass(frozen=True)
class Call:
    """`callee`: index of a function. `plus`: what is added to the caller's parameters before they are passed on."""

    callee: int
    factor: int
    plus: tuple[int, int]
    swapped: bool
    by_name: bool


@dataclass(frozen=True)
class Function:
    name: str
    module: str
    parameters: tuple[str, str]
    factors: tuple[int, int, int]
    calls: tuple[Call, ...] = ()
    remarks: tuple[str, ...] = field(default=(), compare=False)
    keyword_only: bool = False
    """Whether the second parameter can only be given by name."""


@dataclass(frozen=True)
class Change:
    """`after`: the function as it is to be. `wish`: how the proposal says it; `amended`: how the decision changes that."""

    index: int
    kind: str
    after: Function
    wish: str
    amended: str = ""


def make(grade: str, draws: Draws) -> Draft:
    return _Writer(draws, *SIZES[grade]).draft()


class _Writer:
    def __init__(self, draws: Draws, modules: int, accepted: int, others: int) -> None:
        self.draws = draws
        names = draws.sample([f"{first}_{second}" for first in FIRST for second in SECOND])
        self.modules = draws.sample(MODULES, modules)
        self.spare_modules = draws.sample([each for each in MODULES if each not in self.modules])
        self.names = names[3 * modules :]
        self.functions = self._functions(names[: 3 * modules])
        self.style = {module: draws.choice(STYLES) for module in [*MODULES, "__main__"]}
        kinds = ["rename", "move", "parameter", "keyword"]
        chosen = draws.sample(range(len(self.functions) - 3), accepted + others)
        changes = [self._change(kinds[n % 4], index) for n, index in enumerate(chosen)]
        self.accepted, self.others = changes[:accepted], changes[accepted:]

    def _functions(self, names: list[str]) -> list[Function]:
        """Three to a module; each calls functions of earlier modules."""
        draws, made = self.draws, list[Function]()
        for n, name in enumerate(names):
            earlier = range(n - n % 3)
            calls = tuple(
                Call(callee, draws.between(2, 9), (draws.between(0, 9), draws.between(0, 9)), *self._flags())
                for callee in draws.sample(earlier, min(len(earlier), draws.between(1, 3)))
            )
            factors = (draws.between(2, 90), draws.between(2, 90), draws.between(2, 900))
            first, second = draws.sample(PARAMETERS, 2)
            remarks = tuple(chatter(draws, 4))
            made.append(Function(name, self.modules[n // 3], (first, second), factors, calls, remarks))
        return made

    def _flags(self) -> tuple[bool, bool]:
        return self.draws.random() < 0.5, self.draws.random() < 0.5

    def _change(self, kind: str, index: int) -> Change:
        draws, old = self.draws, self.functions[index]
        where, amend = f"`{old.name}` of `harbour/{old.module}.py`", draws.random() < 0.5
        if kind == "rename":
            wished, final = self.names.pop(), self.names.pop()
            wish = f"The function {where} shall be called `{wished}`."
            after = replace(old, name=final if amend else wished)
            return Change(index, kind, after, wish, f"its new name is to be `{final}`" if amend else "")
        if kind == "move":
            wished, final = self.spare_modules.pop(), self.spare_modules.pop()
            wish = f"The function {where} shall move to a new module `harbour/{wished}.py`."
            after = replace(old, module=final if amend else wished)
            return Change(index, kind, after, wish, f"the new module is to be `harbour/{final}.py`" if amend else "")
        if kind == "parameter":
            wished, final = draws.sample(NEW_PARAMETERS, 2)
            wish = f"The parameter `{old.parameters[0]}` of the function {where} shall be called `{wished}`."
            after = replace(old, parameters=(final if amend else wished, old.parameters[1]))
            return Change(index, kind, after, wish, f"the parameter is to be called `{final}`" if amend else "")
        wish = f"The parameter `{old.parameters[1]}` of the function {where} shall be keyword-only."
        return Change(index, kind, replace(old, keyword_only=True), wish)

    def draft(self) -> Draft:
        after = list(self.functions)
        for change in self.accepted:
            after[change.index] = change.after
        before_files, after_files = self._package(self.functions), self._package(after)
        return Draft(
            instruction=INSTRUCTION,
            files={**before_files, **self._papers()},
            expected={
                "accepted": [self._expected(change, change.after) for change in self.accepted],
                "others": [self._expected(change, self.functions[change.index]) for change in self.others],
                "output": {
                    f"{x} {y}": digest(self._output(x, y))
                    for x, y in [(self.draws.between(1, 99), self.draws.between(1, 99))]
                },
            },
            solve="refactoring",
            verify="refactoring",
            solution={f"after/{path}": text for path, text in after_files.items()},
        )

    def _expected(self, change: Change, wanted: Function) -> dict[str, object]:
        old = self.functions[change.index]
        x, y = self.draws.between(1, 99), self.draws.between(1, 99)
        return {
            "module": wanted.module,
            "function": wanted.name,
            "parameters": list(wanted.parameters),
            "keyword_only": wanted.keyword_only,
            # Names that are not to be left: in all modules, or in the function's old one.
            "gone": [old.name] if old.name != wanted.name else [],
            "gone_from": {old.module: wanted.name} if old.module != wanted.module else {},
            "arguments": [x, y],
            "value": digest(str(self._value(change.index, x, y))),
        }

    def _value(self, index: int, x: int, y: int) -> int:
        function = self.functions[index]
        total = function.factors[0] * x + function.factors[1] * y + function.factors[2]
        for call in function.calls:
            pair = (y, x) if call.swapped else (x, y)
            total += call.factor * self._value(call.callee, pair[0] + call.plus[0], pair[1] + call.plus[1])
        return total % MODULUS

    def _tops(self) -> list[int]:
        """Functions that no other calls."""
        called = {call.callee for function in self.functions for call in function.calls}
        return [index for index in range(len(self.functions)) if index not in called]

    def _output(self, x: int, y: int) -> str:
        return "\n".join(str(self._value(index, x, y)) for index in self._tops())

    def _package(self, functions: list[Function]) -> dict[str, str]:
        modules = dict.fromkeys(function.module for function in functions)
        files = {f"harbour/{module}.py": self._module(module, functions) for module in modules}
        return {
            **files,
            "harbour/__init__.py": '"""What a harbour earns."""\n',
            "harbour/__main__.py": self._main(functions),
        }

    def _module(self, module: str, functions: list[Function]) -> str:
        own = [function for function in functions if function.module == module]
        imports = self._imports(module, functions, [call.callee for function in own for call in function.calls])
        bodies = [self._function(function, functions) for function in own]
        return f'"""The harbour\'s {module}."""\n\n' + "\n\n\n".join([*([imports] if imports else []), *bodies]) + "\n"

    def _imports(self, module: str, functions: list[Function], callees: list[int]) -> str:
        style = self.style[module]
        needed = {(functions[callee].module, functions[callee].name) for callee in callees}
        if style == "from":
            lines = {f"from harbour.{other} import {name}" for other, name in needed}
        elif style == "package":
            lines = {f"from harbour import {other}" for other, _ in needed}
        else:
            lines = {f"import harbour.{other} as {other}" for other, _ in needed}
        return "\n".join(sorted(lines))

    def _callee(self, module: str, function: Function) -> str:
        style = self.style[module]
        if style == "from":
            return function.name
        if style == "getattr":
            return f'getattr({function.module}, "{function.name}")'
        return f"{function.module}.{function.name}"

    def _function(self, function: Function, functions: list[Function]) -> str:
        first, second = function.parameters
        star = "*, " if function.keyword_only else ""
        remarks = [f"    # {remark}" for remark in function.remarks]
        lines = [
            f"def {function.name}({first}: int, {star}{second}: int) -> int:",
            *remarks[:2],
            f"    total = {function.factors[0]} * {first} + {function.factors[1]} * {second} + {function.factors[2]}",
            *remarks[2:],
        ]
        for call in function.calls:
            callee = functions[call.callee]
            pair = (second, first) if call.swapped else (first, second)
            values = [f"{name} + {plus}" for name, plus in zip(pair, call.plus, strict=True)]
            if call.by_name:
                values = [f"{name}={value}" for name, value in zip(callee.parameters, values, strict=True)]
            elif callee.keyword_only:
                values[1] = f"{callee.parameters[1]}={values[1]}"
            lines.append(f"    total += {call.factor} * {self._callee(function.module, callee)}({', '.join(values)})")
        return "\n".join([*lines, f"    return total % {MODULUS}"])

    def _main(self, functions: list[Function]) -> str:
        tops = self._tops()
        imports = self._imports("__main__", functions, tops)
        calls = []
        for index in tops:
            function = functions[index]
            second = f"{function.parameters[1]}=second" if function.keyword_only else "second"
            calls.append(f"    print({self._callee('__main__', function)}(first, {second}))")
        head = '"""python3 -m harbour FIRST SECOND"""\n\nimport sys'
        body = "def main(first: int, second: int) -> None:\n" + "\n".join(calls)
        return f"{head}\n\n{imports}\n\n\n{body}\n\n\nmain(int(sys.argv[1]), int(sys.argv[2]))\n"

    def _papers(self) -> dict[str, str]:
        """Proposals, and the minutes of the meetings that decided on them; some were put off first."""
        draws = self.draws
        numbers = draws.sample(range(11, 99), len(self.accepted) + len(self.others))
        changes = [*self.accepted, *self.others]
        files = {}
        days = sorted(draws.sample(range(20, 330), 3 + len(changes)))
        minutes: dict[int, list[str]] = {day: [] for day in days}
        for number, change in zip(numbers, changes, strict=True):
            files[f"proposals/P-{number}.md"] = f"# P-{number}, by {draws.choice(PEOPLE)}\n\n" + among(
                draws, [change.wish], 9
            )
            early, late = sorted(draws.sample(days, 2))
            if change in self.accepted:
                end = f"is accepted, but {change.amended}" if change.amended else "is accepted as it stands"
            else:
                end = draws.choice(("is refused", "is withdrawn by its author", "is put off until next year"))
            if draws.random() < 0.5:
                first = draws.choice(
                    ("is put off", "is accepted as it stands, if nobody objects until the next meeting")
                )
                minutes[early].append(f"P-{number} {first}.")
                end += ", whatever was said of it before"
            minutes[late].append(f"P-{number} {end}.")
        for n, (day, decisions) in enumerate(minutes.items(), 1):
            files[f"minutes/{n:02}.md"] = f"# Meeting of {date(day)}\n\n" + among(draws, draws.sample(decisions), 10)
        return files


def digest(text: str) -> str:
    return hashlib.sha256(text.strip().encode()).hexdigest()


INSTRUCTION = """\
# Carry the decisions out

`/app/harbour` is a Python package; `cd /app && python3 -m harbour 3 4` runs it. Changes to it were proposed in
`/app/proposals`, and the meetings whose minutes are in `/app/minutes` decided on them, sometimes with amendments;
the last word on a proposal counts. Carry out what was accepted, and nothing else.

- Every use of what changes is to change with it, so that the package prints what it printed before, for all numbers.
- After a renaming the old name is not to be left in any `.py` file of the package. After a move the function's name
  is not to be left in its old module.
- No aliases for what is gone.

What counts is the share of accepted changes that are carried out, less changes that were not accepted, if the
package still works.
"""
