"""Places: bounded, shared among tenants, given back whatever happens, and no more threads than there are."""

from __future__ import annotations

import asyncio
import collections
import random
import threading
import time

import pytest

from jaxserve.errors import DeadlineExceeded, Overloaded
from jaxserve.server.admission import Admission, Place


class Desk:
    """Requests that stay where a test wants them."""

    def __init__(self, places: int, threads: int = 1) -> None:
        self.admission = Admission(places, threads, retry_after=2.5)
        self.release = threading.Event()
        self.order: list[str] = []
        self.busy = 0
        self.busiest = 0
        self._lock = threading.Lock()

    def work(self, name: str, seconds: float = 0.0) -> str:
        with self._lock:
            self.order.append(name)
            self.busy += 1
            self.busiest = max(self.busiest, self.busy)
        self.release.wait(5) if not seconds else time.sleep(seconds)
        with self._lock:
            self.busy -= 1
        return name

    def receive(self, tenant: str = "", deadline: float | None = None) -> asyncio.Task[None]:
        """A client that sends its body for ever."""

        async def request() -> None:
            async with self.admission.place(tenant, deadline):
                await asyncio.Event().wait()

        return asyncio.create_task(request())

    def prepare(self, tenant: str = "", name: str = "x", deadline: float | None = None) -> asyncio.Task[str]:
        """A client whose body is there."""

        async def request() -> str:
            async with self.admission.place(tenant, deadline) as place:
                await place.turn()
                return await place.run(self.work, name)

        return asyncio.create_task(request())


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def until(condition) -> None:
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.002)


def at_rest(admission: Admission, threads: int = 1) -> bool:
    return len(admission) == 0 and not admission._waiting and admission._idle_threads == threads


def test_work_is_done_in_a_thread():
    async def run():
        desk = Desk(1)
        desk.release.set()
        assert await desk.prepare(name="a") == "a"
        await until(lambda: at_rest(desk.admission))

    asyncio.run(run())


def test_one_more_than_the_places_is_refused():
    async def run():
        desk = Desk(3)
        tasks = [desk.prepare() for _ in range(3)]
        await settle()
        with pytest.raises(Overloaded) as caught:
            await desk.prepare()
        assert caught.value.retry_after == 2.5
        desk.release.set()
        await asyncio.gather(*tasks)
        assert await desk.prepare() == "x"
        await until(lambda: at_rest(desk.admission))

    asyncio.run(run())


def test_who_sends_slowly_gives_way_the_longest_first():
    async def run():
        desk = Desk(3)
        desk.release.set()
        slow = [desk.receive() for _ in range(3)]
        await settle()
        for _ in range(2):
            assert await desk.prepare() == "x"
        fourth = desk.receive()
        await settle()
        assert [task.done() for task in slow] == [True, False, False]
        newcomers = [desk.receive() for _ in range(2)]
        await settle()
        assert [task.done() for task in (*slow, fourth, *newcomers)] == [True, True, True, False, False, False]
        for task in slow:
            assert isinstance(task.exception(), Overloaded)
        for task in (fourth, *newcomers):
            task.cancel()
        await asyncio.gather(fourth, *newcomers, return_exceptions=True)
        await until(lambda: at_rest(desk.admission))

    asyncio.run(run())


def test_a_tenant_that_has_all_places_gives_way_to_another():
    """Also with texts that wait for a thread: the last of them goes. Those that run are left alone."""

    async def run():
        desk = Desk(4)
        greedy = [desk.prepare("greedy", f"g{n}") for n in range(4)]
        await settle()
        quiet = [desk.prepare("quiet", f"q{n}") for n in range(2)]
        await settle()
        assert [task.done() for task in greedy] == [False, False, True, True]
        with pytest.raises(Overloaded):
            await desk.prepare("quiet")  # two of four are its share
        with pytest.raises(Overloaded):
            await desk.prepare("greedy")
        third = desk.prepare("third", "t")
        await settle()
        desk.release.set()
        found = await asyncio.gather(*greedy, *quiet, third, return_exceptions=True)
        assert sum(isinstance(one, Overloaded) for one in found) == 3
        assert found[0] == "g0"
        assert found[-1] == "t"
        await until(lambda: at_rest(desk.admission))

    asyncio.run(run())


def test_tenants_take_turns_at_the_threads():
    async def run():
        desk = Desk(20)
        tasks = [desk.prepare("greedy", f"g{n}") for n in range(6)]
        tasks += [desk.prepare("quiet", f"q{n}") for n in range(2)]
        await settle()
        desk.release.set()
        await asyncio.gather(*tasks)
        assert desk.order == ["g0", "g1", "q0", "g2", "q1", "g3", "g4", "g5"]

    asyncio.run(run())


@pytest.mark.parametrize("stage", ["receiving", "waiting", "running"])
def test_the_deadline_counts_at_every_stage(stage):
    async def run():
        desk = Desk(9)
        begin = time.monotonic()
        if stage == "waiting":
            other = desk.prepare()
        await settle()
        start = desk.receive if stage == "receiving" else desk.prepare
        with pytest.raises(DeadlineExceeded):
            await start(deadline=begin + 0.05)
        assert time.monotonic() - begin < 3
        desk.release.set()
        if stage == "waiting":
            await other
        await until(lambda: at_rest(desk.admission))

    asyncio.run(run())


def test_a_deadline_that_has_passed_takes_no_place():
    async def run():
        desk = Desk(1)
        first = desk.receive()
        await settle()
        with pytest.raises(DeadlineExceeded):
            await desk.prepare(deadline=time.monotonic() - 1)
        assert not first.done()
        first.cancel()

    asyncio.run(run())


def test_a_timeout_of_the_work_itself_is_its_own():
    def fails() -> None:
        raise TimeoutError("mine")

    async def request(admission: Admission) -> None:
        async with admission.place("", time.monotonic() + 60) as place:
            await place.turn()
            await place.run(fails)

    async def run():
        admission = Admission(1, 1, 1.0)
        with pytest.raises(TimeoutError, match="mine"):
            await request(admission)
        await until(lambda: at_rest(admission))

    asyncio.run(run())


def test_an_abandoned_text_keeps_its_thread_until_it_is_read():
    """Clients that send a long text and hang up at once get no more threads than anybody else."""

    async def run():
        desk = Desk(9)
        gone = desk.prepare(name="gone")
        await until(lambda: desk.busy)
        gone.cancel()
        next_one = desk.prepare(name="next")
        await settle()
        assert desk.order == ["gone"]
        desk.release.set()
        assert await next_one == "next"
        assert desk.busiest == 1
        await until(lambda: at_rest(desk.admission))

    asyncio.run(run())


def test_who_refuses_at_its_turn_gives_the_thread_back():
    async def request(admission: Admission) -> None:
        async with admission.place("") as place:
            await place.turn()
            raise ValueError("no")

    async def run():
        desk = Desk(2)
        desk.release.set()
        with pytest.raises(ValueError, match="no"):
            await request(desk.admission)
        assert at_rest(desk.admission)
        assert await desk.prepare() == "x"

    asyncio.run(run())


def storm(seed: int, admission: Admission, places: int, threads: int, patience: float = 20.0) -> None:
    """Random requests that end in every way; checks at each step that nothing is given twice."""
    rng = random.Random(seed)
    running = 0
    lock = threading.Lock()

    def work(seconds: float) -> None:
        nonlocal running
        with lock:
            running += 1
            assert running <= threads
        time.sleep(seconds)
        with lock:
            running -= 1

    async def request(tenant: str) -> str:
        deadline = time.monotonic() + rng.random() * 0.02 if rng.random() < 0.3 else None
        try:
            async with admission.place(tenant, deadline) as place:
                assert len(admission) <= places
                await asyncio.sleep(rng.choice([0, 0, 0.001, 0.01]))
                await place.turn()
                await place.run(work, rng.choice([0, 0.0005]))
        except Overloaded:
            return "refused"
        except DeadlineExceeded:
            return "late"
        return "done"

    async def run() -> None:
        tasks = []
        for _ in range(150):
            tasks.append(asyncio.create_task(request(rng.choice("aaabc"))))
            if rng.random() < 0.2:
                rng.choice(tasks).cancel()
            if rng.random() < 0.3:
                await asyncio.sleep(rng.random() * 0.002)
        _, hanging = await asyncio.wait(tasks, timeout=patience)
        assert not hanging
        kinds = collections.Counter("cancelled" if task.cancelled() else task.result() for task in tasks)
        assert kinds["done"], kinds
        await until(lambda: at_rest(admission, threads))

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(8))
def test_a_storm_leaves_nothing_behind(seed):
    places, threads = 1 + seed % 5, 1 + seed % 2
    storm(seed, Admission(places, threads, 1.0), places, threads)


class Leaky(Admission):
    """Keeps the thread of whoever is cancelled while it waits: the fault that the storm is there to find."""

    def _leave(self, place: Place) -> None:
        self._forget(place)


def test_the_storm_would_notice_a_leak():
    def storms() -> None:
        for seed in range(8):
            storm(seed, Leaky(3, 1, 1.0), 3, 1, patience=1.0)

    with pytest.raises(AssertionError):
        storms()
