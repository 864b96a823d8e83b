"""Rows of sessions: kept between requests, given up in the end."""

import asyncio
from typing import Any

import pytest

from compactionrl.serving.sessions import Sessions


class Released:
    def __init__(self) -> None:
        self.names: list[str] = []

    async def release(self, affinity: str) -> None:
        self.names.append(affinity)


def sessions(**options: Any) -> tuple[Sessions, list[str]]:
    sampler = Released()
    return Sessions(sampler, **{"limit": 3, **options}), sampler.names  # type: ignore[arg-type]


async def use(rows: Sessions, name: str | None) -> str:
    async with rows.row(name) as affinity:
        return affinity


def test_a_session_has_its_own_row_and_a_request_without_one_gives_its_up() -> None:
    rows, released = sessions()

    async def main() -> None:
        assert await use(rows, "a") == await use(rows, "a")
        assert await use(rows, "b") != await use(rows, "a")
        assert released == []
        alone = await use(rows, None)
        assert released == [alone]
        assert await use(rows, None) != alone

    asyncio.run(main())


def test_while_a_session_is_busy_its_row_is_not_shared() -> None:
    rows, released = sessions()

    async def main() -> None:
        async with rows.row("a") as first, rows.row("a") as second:
            assert first != second
        assert released == [second]
        assert await use(rows, "a") == first

    asyncio.run(main())


def test_a_name_cannot_be_that_of_another_request() -> None:
    rows, _ = sessions()

    async def main() -> None:
        async with rows.row(None) as alone, rows.row(alone) as named:
            assert alone != named

    asyncio.run(main())


def test_the_oldest_beyond_the_limit_are_given_up_but_never_a_busy_one() -> None:
    rows, released = sessions(limit=2)

    async def main() -> None:
        async with rows.row("busy") as busy:
            used = [await use(rows, name) for name in "abca"]
            assert released == [used[0], used[1]]  # a for c, then b for the second a
            assert busy not in released
            await use(rows, "d")
            assert released == [used[0], used[1], used[2]]

    asyncio.run(main())


def test_an_idle_session_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, released = sessions(idle_seconds=10.0)
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)

    async def main() -> None:
        nonlocal now
        a, now = await use(rows, "a"), 6.0
        b, now = await use(rows, "b"), 11.0
        alone = await use(rows, None)
        assert released == [alone, a]
        now = 17.0
        await use(rows, "c")
        assert released == [alone, a, b]

    asyncio.run(main())


def test_a_request_that_fails_leaves_nothing_behind() -> None:
    rows, released = sessions()

    async def main() -> None:
        with pytest.raises(RuntimeError, match="broke"):
            async with rows.row(None) as affinity:
                raise RuntimeError("broke")
        assert released == [affinity]
        assert not rows.busy

    asyncio.run(main())
