"""Data repair: a cash book of many pages with damaged rows, to be mended from running balances and check numbers.

To be carried over: every account's last balance, which rows wait for a later page, and how checks are taken when.
"""

from __future__ import annotations

from dataclasses import dataclass

from compactionrl.environments.logbook import Draws
from compactionrl.terminal_tasks.task import Draft
from compactionrl.terminal_tasks.words import among

SIZES = {"easy": (10, 40, 8, 8, 2), "medium": (24, 50, 14, 20, 4), "hard": (44, 60, 22, 44, 7)}
"""Pages, rows of a page, accounts, damaged rows, circulars that change how checks are taken."""

MODULI = (97, 89, 83, 79, 73, 71, 67, 61, 59, 53)
README = """\
# The cash book

`book/page-NN.csv` are the pages of one cash book, in order. `opening.csv` has every account's balance before the
first page. A row:

`row,account,amount,balance,check`

- `balance` is the account's balance after the row: its balance before plus `amount` (which may be negative).
- `check` is (17 * number of the account + `amount` + `balance`) modulo some number, never negative; the number of
  account `A07` is 7. `circulars/` say which modulus holds from which page on. Before the first circular it is 101.

Some rows are damaged, in one of these ways:

- one of account, amount, balance is lost and reads `?`;
- amount and balance are both lost and read `?` (the account's next row is whole then);
- one digit of the amount, or of the balance, is wrong. Nothing marks such a row.

Row numbers and checks are never damaged, nor is an account's last row. Two damaged rows of an account never follow
each other.
"""


@dataclass
class Row:
    number: int
    account: int
    amount: int
    balance: int
    modulus: int

    def check(self) -> int:
        return (17 * self.account + self.amount + self.balance) % self.modulus

    def cells(self) -> list[str]:
        return [str(self.number), f"A{self.account:02}", str(self.amount), str(self.balance), str(self.check())]


def make(grade: str, draws: Draws) -> Draft:
    pages, rows, accounts, damaged, circulars = SIZES[grade]
    opening = {account: draws.between(2000, 9000) for account in range(1, accounts + 1)}
    starts = sorted(draws.sample(range(2, pages + 1), circulars))
    moduli = dict(zip(starts, draws.sample(MODULI, circulars), strict=True))
    book = _book(draws, pages, rows, opening, moduli)
    whole = [[row.cells() for row in page] for page in book]
    broken = [[list(cells) for cells in page] for page in whole]
    chosen = _chosen(draws, book, opening, damaged)
    for number, damage in chosen.items():
        page, place = divmod(number - 1, rows)
        broken[page][place] = damage
    return Draft(
        instruction=INSTRUCTION,
        files={
            "README.md": README,
            "opening.csv": "account,balance\n" + "".join(f"A{a:02},{balance}\n" for a, balance in opening.items()),
            **{f"book/page-{n:02}.csv": text(page) for n, page in enumerate(broken, 1)},
            **_circulars(draws, moduli),
        },
        expected={
            "pages": {f"page-{n:02}.csv": text(page) for n, page in enumerate(whole, 1)},
            "damaged": sorted(chosen),
        },
        solve="data_repair",
        verify="data_repair",
    )


def text(page: list[list[str]]) -> str:
    return "row,account,amount,balance,check\n" + "".join(",".join(cells) + "\n" for cells in page)


def _book(draws: Draws, pages: int, rows: int, opening: dict[int, int], moduli: dict[int, int]) -> list[list[Row]]:
    balances, modulus, book = dict(opening), 101, []
    for page in range(1, pages + 1):
        modulus = moduli.get(page, modulus)
        book.append(list[Row]())
        for number in range((page - 1) * rows + 1, page * rows + 1):
            account = draws.choice(list(balances))
            amount = draws.between(11, 990) * (1 if balances[account] < 1500 else draws.choice((-1, 1)))
            balances[account] += amount
            book[-1].append(Row(number, account, amount, balances[account], modulus))
    return book


def _chosen(draws: Draws, book: list[list[Row]], opening: dict[int, int], count: int) -> dict[int, list[str]]:
    """Row number -> damaged cells. Each kind of damage comes as often; only what can be mended in one way is done."""
    rows = [row for page in book for row in page]
    place, places = dict[int, int](), dict[int, list[Row]]()
    for row in rows:
        own = places.setdefault(row.account, [])
        place[row.number] = len(own)
        own.append(row)
    chosen: dict[int, list[str]] = {}
    balances = _balances_before(rows, opening)
    for row in draws.sample(rows):
        own, at = places[row.account], place[row.number]
        last = at == len(own) - 1
        near = {each.number for each in own[max(0, at - 1) : at + 2]}
        if last or near & set(chosen):
            continue
        damage = _damage(draws, len(chosen) % 5, row, balances[row.number])
        if damage:
            chosen[row.number] = damage
        if len(chosen) == count:
            return chosen
    raise AssertionError("The book is too small for so much damage.")


def _balances_before(rows: list[Row], opening: dict[int, int]) -> dict[int, dict[int, int]]:
    """Row number -> every account's balance before it."""
    balances, found = dict(opening), {}
    for row in rows:
        found[row.number] = dict(balances)
        balances[row.account] = row.balance
    return found


def _damage(draws: Draws, kind: int, row: Row, before: dict[int, int]) -> list[str] | None:
    number, account, amount, balance, check = row.cells()
    if kind == 0:
        return [number, account, "?", balance, check]
    if kind == 1:
        return [number, account, amount, "?", check]
    if kind == 2:
        fitting = [each for each, held in before.items() if held + row.amount == row.balance]
        return [number, "?", amount, balance, check] if len(fitting) == 1 else None
    if kind == 3:
        return [number, account, "?", "?", check]
    return _slip(draws, row)


def _slip(draws: Draws, row: Row) -> list[str] | None:
    """One wrong digit that the check tells from the right one: mending the other number instead does not fit the check."""
    number, account, amount, balance, check = row.cells()
    in_amount = draws.random() < 0.5
    digits = list(amount if in_amount else balance)
    at = draws.between(1 if digits[0] == "-" else 0, len(digits) - 1)
    digits[at] = draws.choice([each for each in "123456789" if each != digits[at]])
    wrong = int("".join(digits))
    by = wrong - (row.amount if in_amount else row.balance)
    # Whoever takes the slip for one in the other number moves that number by -by or by: the sum moves by 2 * by.
    if by % row.modulus == 0 or 2 * by % row.modulus == 0:
        return None
    return [number, account, str(wrong), balance, check] if in_amount else [number, account, amount, str(wrong), check]


def _circulars(draws: Draws, moduli: dict[int, int]) -> dict[str, str]:
    told = [[f"From page {page} on checks are taken modulo {modulus}."] for page, modulus in moduli.items()]
    letters = draws.sample([*told, *([] for _ in told)])
    return {f"circulars/{n:02}.txt": among(draws, letter, 14) for n, letter in enumerate(letters, 1)}


INSTRUCTION = """\
# Mend the cash book

Some rows of the cash book under `/app/book` are damaged. `/app/README.md` says what a row means, in which ways rows
are damaged and what they can be mended from. Mend them: give every damaged row its right account, amount and
balance, in its file, and leave all other rows as they are.

What counts is the share of damaged rows that are right at the end, less what was spoiled.
"""
