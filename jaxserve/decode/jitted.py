"""The functions that run on the device, jitted: what the server compiles ahead of time is what a notebook calls.

Each takes the module's structure (``graphdef``, static) and its weights (``params``, a nested dict) apart:
``nnx.split`` once, plain ``jax.jit``. The state is donated: after a call, use the one that came back.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxserve.decode import fork as forking
from jaxserve.decode import score as scoring
from jaxserve.decode import step as stepping
from jaxserve.decode.sampling import SamplingRows, TokenScores
from jaxserve.decode.step import Control, DecodeState, Emission, Hint, Strategy

Params = dict[Any, Any]

_PREFILL: dict[str, Any] = {"static_argnames": ("graphdef", "block"), "donate_argnames": ("state",)}
_RUN: dict[str, Any] = {"static_argnames": ("graphdef", "strategy", "max_steps"), "donate_argnames": ("state",)}
_HAND: dict[str, Any] = {"static_argnames": ("strategy",), "donate_argnames": ("state",)}
_FORK: dict[str, Any] = {"donate_argnames": ("state",)}
_SCRUB: dict[str, Any] = {"donate_argnames": ("state",)}


@partial(jax.jit, **_PREFILL)
def prefill(
    graphdef: nnx.GraphDef[Any],
    params: Params,
    state: DecodeState,
    slot: Int[Array, ""],
    tokens: Int[Array, " t"],
    start: Int[Array, ""],
    count: Int[Array, ""],
    *,
    block: int | None = None,
) -> DecodeState:
    """``decode.step.prefill``, one program a chunk length."""
    return stepping.prefill(nnx.merge(graphdef, params), state, slot, tokens, start, count, block)


@partial(jax.jit, **_RUN)
def run(
    graphdef: nnx.GraphDef[Any],
    params: Params,
    state: DecodeState,
    control: Control,
    rows: SamplingRows,
    steps: Int[Array, ""],
    *,
    strategy: Strategy,
    max_steps: int,
) -> tuple[DecodeState, Emission]:
    """``decode.step.run``, one program a pool and strategy."""
    return stepping.run(nnx.merge(graphdef, params), state, control, rows, steps, strategy, max_steps)


@partial(jax.jit, **_HAND)
def hand(state: DecodeState, slot: Int[Array, ""], hint: Hint, *, strategy: Strategy) -> DecodeState:
    """``decode.step.hand``, one program a pool of a strategy that remembers."""
    return stepping.hand(state, slot, hint, strategy)


@partial(jax.jit, **_FORK)
def fork(state: DecodeState, source: Int[Array, ""], target: Int[Array, ""]) -> DecodeState:
    """``decode.fork.fork``, one program a pool of more than one slot."""
    return forking.fork(state, source, target)


@partial(jax.jit, **_SCRUB)
def scrub(state: DecodeState, slot: Int[Array, ""]) -> DecodeState:
    """``decode.step.scrub``, one program a pool."""
    return stepping.scrub(state, slot)


@dataclasses.dataclass(frozen=True, slots=True)
class Served:
    """The functions that a server compiles, as above."""

    prefill: Callable[..., Any]
    run: Callable[..., Any]
    hand: Callable[..., Any]
    fork: Callable[..., Any]
    scrub: Callable[..., Any]


ON_ONE_DEVICE = Served(prefill, run, hand, fork, scrub)


def over_mesh(state: Any, rest: Any) -> Served:
    """The same for a mesh of devices: results lie where arguments lay, so that the next call takes them as they are.

    Args:
        state: the shardings of a ``DecodeState``, leaf by leaf.
        rest: of everything else that comes back.
    """
    return Served(
        jax.jit(inspect.unwrap(prefill), **_PREFILL, out_shardings=state),
        jax.jit(inspect.unwrap(run), **_RUN, out_shardings=(state, rest)),
        jax.jit(inspect.unwrap(hand), **_HAND, out_shardings=state),
        jax.jit(inspect.unwrap(fork), **_FORK, out_shardings=state),
        jax.jit(inspect.unwrap(scrub), **_SCRUB, out_shardings=state),
    )


@partial(jax.jit, static_argnames=("graphdef", "strategy"), donate_argnames=("state",))
def step(
    graphdef: nnx.GraphDef[Any], params: Params, state: DecodeState, rows: SamplingRows, *, strategy: Strategy
) -> tuple[DecodeState, Emission]:
    """``decode.step.step``: one pass, for whoever decodes by hand."""
    return stepping.step(nnx.merge(graphdef, params), state, rows, strategy)


@partial(jax.jit, static_argnames=("graphdef", "alternatives"))
def score(graphdef: nnx.GraphDef[Any], params: Params, tokens: Int[Array, "b t"], alternatives: int = 0) -> TokenScores:
    """``decode.score.score``, one program a text length."""
    return scoring.score(nnx.merge(graphdef, params), tokens, alternatives)


@partial(jax.jit, static_argnames=("graphdef",))
def logits(graphdef: nnx.GraphDef[Any], params: Params, tokens: Int[Array, "b t"]) -> Float[Array, "b t v"]:
    """``decode.score.logits``, one program a text length."""
    return scoring.logits(nnx.merge(graphdef, params), tokens)
