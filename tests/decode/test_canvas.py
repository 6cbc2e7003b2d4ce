"""Canvases as transformers' own ``generate`` fills them, with the same random numbers, token for token in each pass."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.decode import jitted
from jaxserve.decode.canvas import CanvasDiffusion, accepted, strategy_of
from jaxserve.decode.step import Control, DecodeState, Hint, Proposal, Verdict, causal, empty_state
from jaxserve.decode.tally import COLUMNS
from jaxserve.errors import ConfigError
from tests.decode.rows import sampling_rows
from tests.models import tiny_checkpoints as tiny

CASE = "diffusion_gemma"
POSITIONS, CHUNK, MAX_STEPS = 256, 96, 4
SIZE, CANVASES = 20, 2
REQUESTS = range(5)

pytestmark = pytest.mark.reference


@cache
def model() -> tuple[Any, Any, CanvasDiffusion]:
    family, params = tiny.load(CASE)
    return family, params, strategy_of(family, jnp.float32, alternatives=2)


@cache
def golden() -> dict[str, np.ndarray]:
    return tiny.goldens(CASE)


@dataclasses.dataclass
class Filled:
    """What one request got: emitted tokens, and for each pass that refined what it read and its most likely tokens.

    ``scores`` are of emitted tokens: log-probability, most likely token, its log-probability.
    """

    tokens: list[int]
    read: list[np.ndarray | None]
    best: list[list[int]]
    scores: list[tuple[float, int, float]]
    counted: np.ndarray

    def count(self, name: str) -> int:
        return int(self.counted[COLUMNS.index(name)])


def prompt(request: int) -> np.ndarray:
    return golden()["prompt"][: int(golden()["requests"][request, 0])]


def hint(request: int, draft: Any = (), **changes: float) -> Hint:
    """The request's own settings; transformers' and ours stand in the same order."""
    settings = golden()["requests"][request, 1:].copy()
    for name, value in changes.items():
        settings[model()[2].settings.index(name)] = value
    tokens = np.zeros(POSITIONS, np.int32)
    tokens[: len(draft)] = draft
    return Hint(jnp.asarray(tokens), jnp.int32(len(draft)), jnp.asarray(settings, jnp.float32))


def sampling(temperature: float = 1.0, **changes: Any) -> Any:
    seeds = np.stack([np.array([0, seed], np.uint32) for seed in golden()["filled_seed"]])
    limit = np.array([len(prompt(request)) + SIZE * CANVASES for request in REQUESTS])
    start = limit - SIZE * CANVASES
    fields = {"seed": seeds, "limit": limit, "alternatives": True, "prompt_length": start} | changes
    return sampling_rows(len(REQUESTS), temperature=temperature, **fields)


@dataclasses.dataclass(frozen=True)
class Filling:
    """Requests, each in its own slot, and what is done to them.

    Attributes:
        joins: at which dispatch each request joins.
        steps: passes a dispatch; what a pass read is seen only where it is one.
        held: tokens of a text that are in the cache when its request joins, by default all.
        texts: what is known of a request when it joins, by default its prompt.
        settings: other ones than the requests' own.
        drafts: that requests bring along.
    """

    joins: dict[int, int]
    steps: int = 1
    rows: Any = None
    strategy: CanvasDiffusion | None = None
    params: Any = None
    held: dict[int, int] = dataclasses.field(default_factory=dict)
    texts: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)
    settings: dict[str, float] = dataclasses.field(default_factory=dict)
    drafts: dict[int, Any] = dataclasses.field(default_factory=dict)

    def run(self) -> dict[int, Filled]:
        """Passes until every request has ended."""
        family, params, own = model()
        strategy, rows = self.strategy or own, self.rows if self.rows is not None else sampling()
        graphdef, params, slots = family.graphdef(jnp.float32), self.params or params, len(REQUESTS)
        state = empty_state(family.empty_cache(slots, POSITIONS, jnp.float32), strategy)
        found = {request: Filled([], [], [], [], np.zeros(len(COLUMNS), int)) for request in self.joins}
        for turn in range(200):
            ready = [request for request, at in self.joins.items() if at == turn]
            state, control = self._joined(graphdef, params, state, strategy, ready)
            # What rows are about to read, but for the first pass of a canvas.
            canvas, step = jax.device_get((state.memory.canvas, state.memory.step))
            given = (graphdef, params, state, control, rows, jnp.int32(self.steps))
            state, log = jitted.run(*given, strategy=strategy, max_steps=MAX_STEPS)
            log = jax.device_get(log)
            assert log.finite.all()
            for request, mine in found.items():
                for at in range(self.steps):
                    self._noted(mine, jax.tree.map(lambda leaf: leaf[at, request], log))  # noqa: B023
                    if len(mine.best) > len(mine.read):
                        mine.read.append(canvas[request] if step[request] and self.steps == 1 else None)
            if not state.active.any() and turn >= max(self.joins.values()):
                return found
        raise AssertionError("no end")

    def _joined(
        self, graphdef: Any, params: Any, state: DecodeState, strategy: CanvasDiffusion, ready: list[int]
    ) -> tuple[DecodeState, Control]:
        slots = len(REQUESTS)
        admit, pending = np.zeros(slots, bool), np.zeros((slots, SIZE), np.int32)
        length, count = np.zeros(slots, np.int32), np.zeros(slots, np.int32)
        for request in ready:
            text = self.texts.get(request, prompt(request))
            held = self.held.get(request, len(text))
            for start in range(0, len(text), CHUNK):  # read beyond what is held, too: that puts the tokens there
                chunk = np.zeros(CHUNK, np.int32)
                chunk[: len(text) - start] = text[start : start + CHUNK]
                kept = min(max(held - start, 0), CHUNK)
                at = (jnp.int32(request), jnp.asarray(chunk), jnp.int32(start), jnp.int32(kept))
                state = jitted.prefill(graphdef, params, state, *at, block=1)
            told = hint(request, self.drafts.get(request, ()), **self.settings)
            state = jitted.hand(state, jnp.int32(request), told, strategy=strategy)
            rest = text[held : held + SIZE]
            pending[request, : len(rest)] = rest
            admit[request], length[request], count[request] = True, held, len(text) - held
        return state, Control(*map(jnp.asarray, (np.ones(slots, bool), admit, length, pending, count)))

    @staticmethod
    def _noted(mine: Filled, log: Any) -> None:
        mine.tokens += log.tokens[: log.count].tolist()
        places = zip(log.scores.chosen, log.scores.top_ids[:, 0], log.scores.top[:, 0], strict=True)
        mine.scores += list(places)[: log.count]
        mine.counted += log.tally
        if log.tally.any() and log.tokens.any():  # a pass that reads shows no canvas
            mine.best.append(log.tokens.tolist())


def right(request: int) -> dict[str, np.ndarray]:
    return {name: golden()[f"filled_{name}"][request] for name in ("tokens", "passes", "read", "best")}


def agrees(request: int, mine: Filled) -> bool:
    """Tokens, number of passes, and in each pass the canvas read and the most likely tokens are transformers' own."""
    theirs = right(request)
    places = [(canvas, turn) for canvas, passes in enumerate(theirs["passes"]) for turn in range(passes)]
    return (
        mine.tokens == theirs["tokens"].tolist()
        and mine.best == [theirs["best"][place].tolist() for place in places]
        and all(
            read is None or read.tolist() == theirs["read"][place].tolist()
            for place, read in zip(places, mine.read, strict=True)
        )
    )


# --- against transformers ---------------------------------------------------------------------------------------------

JOINS = {0: 0, 1: 2, 2: 3, 3: 5, 4: 6}


@cache
def together() -> dict[int, Filled]:
    """All requests, each joining in the middle of the others' canvases, pass by pass."""
    return Filling(JOINS).run()


@pytest.mark.parametrize("request_", REQUESTS)
def test_canvases_are_filled_as_transformers_fills_them(request_, supports):
    mine, passes = together()[request_], right(request_)["passes"]
    assert agrees(request_, mine)
    assert sum(read is None for read in mine.read) == CANVASES
    assert mine.count("passes") == passes.sum() + 1  # the first canvas is read as text once; of the last nobody asks
    supports("diffusion_gemma", "blocks")


def test_the_goldens_have_canvases_that_settle_and_such_that_do_not():
    most, passes = golden()["requests"][:, 1], golden()["filled_passes"]
    assert (passes < most[:, None]).any()
    assert (passes == most[:, None]).any()


@pytest.mark.parametrize("alone", [1, 3])
def test_a_request_alone_gets_what_it_gets_in_company(alone):
    mine = Filling({alone: 0}, steps=3).run()[alone]
    assert agrees(alone, mine)
    assert mine.scores == together()[alone].scores
    assert (mine.counted == together()[alone].counted).all()


def test_passes_a_dispatch_do_not_matter():
    found = Filling({2: 0, 1: 1, 0: 0, 4: 2, 3: 1}, steps=MAX_STEPS).run()
    assert all(agrees(request, mine) for request, mine in found.items())


def test_what_is_known_is_read_as_text_before_a_canvas_begins():
    """The end of a prompt by passes instead of chunks; and emitted tokens again, more than a pass reads."""
    first = right(1)["tokens"][:SIZE]
    texts = {1: np.concatenate([prompt(1), first])}
    found = Filling({0: 0, 1: 0}, texts=texts, held={0: len(prompt(0)) - 1, 1: 2}).run()
    assert agrees(0, found[0])
    assert found[1].tokens == right(1)["tokens"][SIZE:].tolist()
    assert found[1].count("passes") == right(1)["passes"][1] + 2


# --- mistakes ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Mistaken(CanvasDiffusion):
    """Each slot makes another mistake."""

    def propose(self, model: Any, state: DecodeState, rows: Any) -> Proposal:
        found = super().propose(model, state, rows)
        slot = jnp.arange(len(state.known))[:, None, None]
        return dataclasses.replace(found, mask=jnp.where(slot == 1, causal(self.size), found.mask))

    def accept(self, logits: Any, proposal: Proposal, state: DecodeState, rows: Any) -> Verdict:
        found = super().accept(logits, proposal, state, rows)
        slot = jnp.arange(len(state.known))[:, None]
        kept = jnp.where(slot == 2, found.tokens, found.memory.canvas)
        return dataclasses.replace(
            found,
            tokens=jnp.where((slot == 0) & (found.count > 0)[:, None], proposal.tokens, found.tokens),
            memory=dataclasses.replace(found.memory, canvas=kept),
            advance=jnp.where((slot[:, 0] == 3) & (found.count > 0), found.count, found.advance),
        )


MISTAKES = {
    0: "what was read last is emitted, not what is most likely",
    1: "positions of a canvas see only those before them",
    2: "nothing becomes random again",
    3: "the cache keeps what a canvas's pass computed",
}


@cache
def mistaken() -> dict[int, Filled]:
    fields = {field.name: getattr(model()[2], field.name) for field in dataclasses.fields(CanvasDiffusion)}
    return Filling(dict.fromkeys(REQUESTS, 0), strategy=Mistaken(**fields)).run()


@pytest.mark.parametrize("slot", MISTAKES, ids=list(MISTAKES.values()))
def test_a_mistake_of_the_strategy_would_show(slot):
    assert mistaken()[slot].tokens != right(slot)["tokens"].tolist()


def without_conditioning(params: Any) -> Any:
    return params | {"conditioning": jax.tree.map(jnp.zeros_like, params["conditioning"])}


def with_scales_of_text(params: Any) -> Any:
    layers = {index: layer | {"canvas_scale": layer["scale"]} for index, layer in params["layers"].items()}
    return params | {"layers": layers}


def with_scales_of_canvases(params: Any) -> Any:
    layers = {index: layer | {"scale": layer["canvas_scale"]} for index, layer in params["layers"].items()}
    return params | {"layers": layers}


@pytest.mark.parametrize("change", [without_conditioning, with_scales_of_text, with_scales_of_canvases])
def test_a_mistake_of_the_model_would_show(change):
    found = Filling({0: 0, 1: 0}, steps=MAX_STEPS, params=change(model()[1])).run()
    assert not any(agrees(request, mine) for request, mine in found.items())


@pytest.mark.parametrize(
    "settings",
    [
        {"hottest": 0.2},
        {"coldest": 0.5},
        {"denoising_steps": 11},
        {"entropy_bound": 1.0},
        {"certain_entropy": 1e-6},
        {"stable_steps": 2},
    ],
    ids=str,
)
def test_every_setting_matters(settings):
    assert not agrees(1, Filling({1: 0}, steps=MAX_STEPS, settings=settings).run()[1])


# --- requests' own affairs --------------------------------------------------------------------------------------------


def test_the_account_adds_up():
    for request, mine in together().items():
        best, passes = right(request)["best"], right(request)["passes"]
        assert mine.count("drafted") == SIZE * CANVASES == mine.count("accepted") + mine.count("rejected")
        assert mine.count("blocks") == CANVASES
        kept = sum((best[canvas, 0] == best[canvas, turns - 1]).sum() for canvas, turns in enumerate(passes))
        assert mine.count("accepted") == kept
        changes = sum((best[c, 1:turns] != best[c, : turns - 1]).sum() for c, turns in enumerate(passes))
        assert mine.count("edited") == changes
        assert mine.count("wasted") == 0


def test_a_canvas_is_cut_behind_a_stop_token():
    tokens = right(3)["tokens"].tolist()
    stop = tokens[7]
    at = tokens.index(stop)
    mine = Filling({3: 0}, rows=sampling(stop_ids=[stop, -1, -1])).run()[3]
    assert mine.tokens == tokens[: at + 1]
    assert mine.count("wasted") == SIZE - at - 1


def test_scores_are_of_emitted_tokens():
    for mine in together().values():
        assert len(mine.scores) == len(mine.tokens)
        for token, (chosen, likeliest, most) in zip(mine.tokens, mine.scores, strict=True):
            assert likeliest == token  # of the last pass, before any temperature
            assert chosen == pytest.approx(most, abs=1e-5)
            assert chosen < 0


def test_at_temperature_zero_what_is_accepted_is_the_most_likely():
    """Here the bound accepts everything."""
    mine = Filling({3: 0}, rows=sampling(temperature=0.0)).run()[3]
    later = [turn for turn, read in enumerate(mine.read) if read is not None]
    assert len(later) > 1
    assert all(mine.read[turn].tolist() == mine.best[turn - 1] for turn in later)


def test_a_draft_stands_in_a_canvas_and_is_refined():
    """A right one settles sooner; what is counted as predicted is the draft, and how much of it was right."""
    theirs = right(1)["tokens"]
    found = Filling({1: 0, 3: 0}, drafts={1: theirs, 3: (right(3)["tokens"][:5] + 1) % 256}).run()
    assert found[1].count("passes") < together()[1].count("passes") - 5
    agreed = int((np.array(found[1].tokens) == theirs).sum())
    assert (found[1].count("predicted_accepted"), found[1].count("predicted_rejected")) == (agreed, 40 - agreed)
    assert found[3].count("predicted_accepted") + found[3].count("predicted_rejected") == 5
    assert found[3].best[0] != together()[3].best[0]
    assert together()[1].count("predicted_accepted") == 0


def test_a_bias_bears_on_what_is_emitted():
    banned = sorted(set(right(3)["tokens"].tolist()))[:4]
    rows = sampling(bias_ids=np.array(banned), bias=np.full(4, -100.0))
    assert not set(Filling({3: 0}, steps=MAX_STEPS, rows=rows).run()[3].tokens) & set(banned)


def test_what_a_request_does_not_set_is_the_strategy_s():
    strategy = model()[2]
    silent = dataclasses.replace(hint(0), settings=jnp.full(len(strategy.settings), jnp.nan))
    memory = strategy.memory(3, POSITIONS)
    told = strategy.hand(memory, jnp.int32(1), hint(0))
    assert told.rows.denoising_steps.tolist() == [48, 8, 48]
    assert strategy.hand(told, jnp.int32(1), silent).rows.denoising_steps.tolist() == [48, 48, 48]
    for before, after in zip(jax.tree.leaves(memory), jax.tree.leaves(told), strict=True):
        assert (before.shape, before.dtype, before.weak_type) == (after.shape, after.dtype, after.weak_type)


def test_a_file_says_what_its_model_is_best_asked_with():
    family, _, strategy = model()
    assert strategy_of(family, jnp.float32, 2, {"max_denoising_steps": None, "temperature": 0.5}) == strategy
    stated = {"max_denoising_steps": 9, "sampler_config": {"entropy_bound": 1}, "t_min": 0.2, "stability_threshold": 0}
    told = strategy_of(family, jnp.float32, 2, stated | {"t_max": 0.9, "confidence_threshold": 0.1})
    expected = {"denoising_steps": 9, "entropy_bound": 1.0, "coldest": 0.2, "hottest": 0.9, "stable_steps": 0}
    assert told == dataclasses.replace(strategy, **expected, certain_entropy=0.1)
    for wrong in ({"t_min": "cold"}, {"t_max": -1.0}, {"max_denoising_steps": 0}, {"stability_threshold": 1.5}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            strategy_of(family, jnp.float32, 2, wrong)


def test_settings_that_make_no_sense_give_tokens_all_the_same():
    absurd = {"coldest": -1.0, "hottest": 0.0, "denoising_steps": 0.0, "entropy_bound": -1.0}
    mine = Filling({1: 0}, settings=absurd).run()[1]
    assert mine.count("passes") == CANVASES + 1
    assert all(0 <= token < model()[2].vocab_size for token in mine.tokens)


def test_the_surest_are_accepted_while_their_sum_allows_it():
    rng = np.random.default_rng(0)
    entropy = rng.exponential(size=(6, 30)).astype(np.float32)
    entropy[0, 5:20] = entropy[0, 5]  # ties
    bound = np.array([3.0, 0.0, 0.2, 1.0, 5.0, 1e6], np.float32)
    found = np.asarray(accepted(jnp.asarray(entropy), jnp.asarray(bound)))
    for row, most, kept in zip(entropy, bound, found, strict=True):
        order = np.argsort(row, kind="stable")
        before = np.cumsum(row[order]) - row[order]
        assert sorted(order[before <= most + 1e-6]) == np.flatnonzero(kept).tolist()
    assert found.sum(1)[[1, 5]].tolist() == [1, 30]
