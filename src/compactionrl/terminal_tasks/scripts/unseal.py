"""python3 unseal.py SEAL FIRST-WORD SECOND-WORD: prints the letter under that seal, if these are its words."""

import hashlib
import hmac
import sys
from pathlib import Path

ROUNDS = 50_000


def main(seal: str, first: str, second: str) -> None:
    letter = Path(__file__).parent / "letters" / f"{seal.lower()}.sealed"
    if not letter.is_file():
        raise SystemExit(f"There is no letter under the seal {seal}.")
    tag, sealed = (content := bytes.fromhex(letter.read_text()))[:32], content[32:]
    key = hashlib.pbkdf2_hmac("sha256", f"{first}|{second}".lower().encode(), letter.stem.encode(), ROUNDS)
    if not hmac.compare_digest(tag, hmac.digest(key, sealed, "sha256")):
        raise SystemExit("These are not its words.")
    stream = b"".join(hashlib.sha256(key + n.to_bytes(4, "big")).digest() for n in range(len(sealed) // 32 + 1))
    print(bytes(a ^ b for a, b in zip(sealed, stream, strict=False)).decode(), end="")


if len(sys.argv) != 4:
    raise SystemExit(__doc__)
main(*sys.argv[1:])
