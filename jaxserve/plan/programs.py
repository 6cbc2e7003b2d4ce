"""What a plan compiles: pools of slots, the chunks that prompts are read in, and the programs. Arithmetic only."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a prompt: ``count`` tokens from ``start`` on, padded to ``bucket``."""

    start: int
    count: int
    bucket: int


@dataclasses.dataclass(frozen=True, slots=True)
class PoolPlan:
    """One pool's static shapes.

    Attributes:
        slots: requests side by side.
        length: tokens, prompt and output, that a request of this pool may have.
        rows: rows of the compiled programs; more than ``slots`` only where a single row would be slow.
        positions: cache positions of a row; ``length`` rounded up to whole chunks and key blocks.
        buckets: chunk lengths, ascending.
        block: positions of a text that are decoded together; ``None`` where it is one after the other.
    """

    slots: int
    length: int
    rows: int
    positions: int
    buckets: tuple[int, ...]
    block: int | None = None

    def __str__(self) -> str:
        return f"{self.slots}x{self.length}"

    def read(self, prompt: int) -> int:
        """How many of a prompt's tokens are read before decoding, which reads the others.

        All but the last, so that each token of a request comes from the same program; in blocks, all whole ones.
        """
        return prompt - 1 if self.block is None else prompt // self.block * self.block

    def chunks(self, count: int) -> tuple[Chunk, ...]:
        """How ``count`` prompt tokens are read; depends on nothing else, so a request's numbers don't either.

        A chunk is padded at most to twice its tokens, unless it is the smallest.
        """
        chunks, start = [], 0
        while (left := count - start) > 0:
            fitting = [bucket for bucket in self.buckets if bucket >= left]
            if not fitting or (fitting[0] > 2 * left and fitting[0] != self.buckets[0]):
                bucket = max(bucket for bucket in self.buckets if bucket <= left)
            else:
                bucket = fitting[0]
            chunks.append(Chunk(start, min(bucket, left), bucket))
            start += bucket
        return tuple(chunks)

    def chunks_again(self, prompt: int, known: int) -> tuple[Chunk, ...]:
        """How a request whose cache is lost is read again: ``known`` tokens, ``prompt`` of them its prompt.

        The chunks of the prompt come last and are those of the first time, so that its entries are the same numbers.
        What was generated is read before only to put the tokens there; decode steps then read it once more, one by
        one, as they did at first.
        """
        own = self.chunks(self.read(prompt))
        if known == prompt:
            return own
        covered = own[-1].start + own[-1].bucket if own else 0
        return tuple(chunk for chunk in self.chunks(known) if chunk.start + chunk.count > covered) + own


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """One executable of one pool.

    ``prefill`` reads a chunk of one length, ``run`` does several decode steps, ``hand`` gives the strategy what a
    request brings along, ``fork`` copies a slot into another one, ``scrub`` empties a slot.
    """

    kind: Literal["prefill", "run", "hand", "fork", "scrub"]
    pool: int
    bucket: int = 0

    def __str__(self) -> str:
        return f"{self.kind} pool {self.pool}" + (f" bucket {self.bucket}" if self.bucket else "")
