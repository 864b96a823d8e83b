"""Goes through the book twice: forward with every account's balance, and with each account's next row at hand."""

from __future__ import annotations

import csv
import re
from pathlib import Path

from prose import prose

APP = Path("/app")
MODULUS = re.compile(r"From page (\d+) on checks are taken modulo (\d+)\.")


def main() -> None:
    moduli = {int(page): int(modulus) for page, modulus in MODULUS.findall(prose(APP / "circulars"))}
    with (APP / "opening.csv").open() as file:
        balances = {row["account"]: int(row["balance"]) for row in csv.DictReader(file)}
    pages = sorted(APP.glob("book/page-*.csv"))
    rows: list[dict[str, str]] = []
    modulus = 101
    for number, page in enumerate(pages, 1):
        modulus = moduli.get(number, modulus)
        with page.open() as file:
            rows += [{**row, "page": page.name, "modulus": str(modulus)} for row in csv.DictReader(file)]
    for at, row in enumerate(rows):
        if row["account"] == "?":
            row["account"] = next(a for a, b in balances.items() if b + int(row["amount"]) == int(row["balance"]))
        mend(row, balances[row["account"]], rows[at + 1 :])
        balances[row["account"]] = int(row["balance"])
    for page in pages:
        with page.open("w", newline="") as file:
            writer = csv.DictWriter(
                file, ["row", "account", "amount", "balance", "check"], extrasaction="ignore", lineterminator="\n"
            )
            writer.writeheader()
            writer.writerows(row for row in rows if row["page"] == page.name)


def mend(row: dict[str, str], before: int, later: list[dict[str, str]]) -> None:
    """Try, in turn: the amount is right; the balance is right; neither, then the account's next row tells the balance."""
    following = next((each for each in later if each["account"] == row["account"]), None)
    candidates = []
    if row["amount"] != "?":
        candidates.append(before + int(row["amount"]))
    if row["balance"] != "?":
        candidates.append(int(row["balance"]))
    if not candidates and following:
        candidates.append(int(following["balance"]) - int(following["amount"]))
    for balance in candidates:
        total = 17 * int(row["account"][1:]) + balance - before + balance
        if total % int(row["modulus"]) == int(row["check"]):
            row["amount"], row["balance"] = str(balance - before), str(balance)
            return
    raise SystemExit(f"Row {row['row']} cannot be mended: {row}")


main()
