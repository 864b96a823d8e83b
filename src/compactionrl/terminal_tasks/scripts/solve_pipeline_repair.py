"""Reads the circulars for the rates in force and the sheets for what each stage does, and writes every stage anew."""

from __future__ import annotations

import re
from pathlib import Path

APP = Path("/app")
MONTHS = [
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
]  # fmt: skip
HEAD = re.compile(r"Circular (\d+), (\d+) (\w+),")
RATE = re.compile(r"he (\w+ rate) is (\d+)\.")
ANNULLED = re.compile(r"Circular (\d+) is annulled")


def rates() -> dict[str, str]:
    texts = [" ".join(file.read_text().split()) for file in APP.glob("circulars/*.txt")]
    annulled = {match[1] for text in texts for match in ANNULLED.finditer(text)}
    heads = [(HEAD.match(text), text) for text in texts]
    dated = sorted((MONTHS.index(head[3]), int(head[2]), head[1], text) for head, text in heads if head)
    return {m[1]: m[2] for _, _, number, text in dated if number not in annulled for m in RATE.finditer(text)}


def main() -> None:
    known = rates()
    forms = [file.read_text().splitlines() for file in Path(__file__).parent.glob("bodies/*.txt")]
    patterns = [(re.compile(re.escape(sheet).replace(r"\{rate\}", r"(\w+ rate)")), body) for sheet, body in forms]
    for sheet in APP.glob("sheets/*.txt"):
        text = " ".join(sheet.read_text().split())
        for pattern, body in patterns:
            if match := pattern.search(text):
                stage = f"def run(values: list[int]) -> list[int]:\n    return {body.format(n=known[match[1]])}\n"
                (APP / "stages" / f"{sheet.stem}.py").write_text(stage)


main()
