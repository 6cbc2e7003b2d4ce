"""The tiny block-diffusion model: what is committed masters its task, and its recipe trains what is served."""

from __future__ import annotations

from functools import partial
from itertools import islice
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import records
from checkpoints.recipes import block_decoding, blocks, characters, tiny_diffusion
from checkpoints.recipes.tiny_diffusion import BLOCK, CONFIG, NAME, POSITIONS
from jaxserve.checkpoint import manifest
from jaxserve.checkpoint.restore import restore
from jaxserve.checkpoint.store import Store
from jaxserve.models.family import Family, family_of
from jaxserve.models.weights import abstract
from jaxserve.text.chat import ChatTemplate
from jaxserve.text.folder import read_json
from jaxserve.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2] / "checkpoints"
SMALL = CONFIG | {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 32}


@pytest.fixture(scope="module")
def folder() -> Path:
    return Store(ROOT).path(NAME)


@pytest.fixture(scope="module")
def small() -> Family:
    return family_of(SMALL)


@pytest.fixture(scope="module")
def leaves(small) -> dict[str, jax.Array]:
    """Of a model that has learnt nothing, with experts that are far from balanced."""
    fresh = tiny_diffusion.begin(small, seed=0)
    draw = np.random.default_rng(0)
    return {
        path: jnp.asarray(draw.standard_normal(leaf.shape, np.float32)) if path.endswith("correction") else 3 * leaf
        for path, leaf in fresh.items()
    }


def some(count: int, **kind) -> list[records.Record]:
    return list(islice(records.records(7, **kind), count))


# --- the records ------------------------------------------------------------------------------------------------------


def test_held_out_records_are_always_the_same_and_never_trained_on():
    found = records.held_out()
    assert len(set(found)) == 500
    assert found[:50] == records.held_out(50)
    assert found[0].question == "Alice Sato, 70, Dublin"
    assert all(record.held_out for record in found)
    trained = some(5000, held_out=False)
    assert not {(one.first, one.last, one.city) for one in trained} & {(one.first, one.last, one.city) for one in found}
    assert {one.age for one in trained} == set(records.AGES)


def test_the_longest_record_fits():
    longest = [max(words, key=len) for words in (records.FIRST, records.LAST, records.CITIES)]
    record = records.Record(longest[0], longest[1], 79, longest[2])
    assert len(characters.prompt(record.question)) + len(record.answer) + 1 <= POSITIONS


def test_a_corrupted_draft_is_wrong_where_it_says():
    for record in some(50, held_out=True):
        draft, places = records.corrupted(record.answer, 6, seed=1)
        assert [at for at in range(len(draft)) if draft[at] != record.answer[at]] == list(places)
        assert len(places) == 6
        assert len(draft) == len(record.answer)
        assert (draft, places) == records.corrupted(record.answer, 6, seed=1)
        assert draft != records.corrupted(record.answer, 6, seed=2)[0]


# --- the recipe -------------------------------------------------------------------------------------------------------


@partial(jax.jit, static_argnums=0)
def passed(graphdef, leaves, tokens, mask, positions):
    model = blocks.merged(graphdef, leaves)
    return model(tokens[None], jnp.zeros(1, jnp.int32), mask[None], positions=positions[None])[0][0]


def hidden(graphdef, leaves, tokens, mask, positions=None):
    positions = np.arange(len(tokens)) if positions is None else positions
    return np.asarray(passed(graphdef, leaves, jnp.asarray(tokens), jnp.asarray(mask), jnp.asarray(positions)))


def test_what_is_trained_is_what_is_served(small, leaves):
    """All experts weighed, or the chosen ones only: the same numbers."""
    tokens = np.random.default_rng(1).integers(0, characters.VOCABULARY, 96).astype(np.int32)
    mask = blocks.seen(96, BLOCK)
    served = hidden(small.graphdef(jnp.float32), leaves, tokens, mask)
    np.testing.assert_allclose(hidden(blocks.trainable(small), leaves, tokens, mask), served, atol=1e-4)
    other = {path: 0 * leaf if path.endswith("correction") else leaf for path, leaf in leaves.items()}
    assert np.abs(hidden(blocks.trainable(small), other, tokens, mask) - served).max() > 1e-2


def test_a_noisy_block_is_trained_as_it_is_decoded(small, leaves):
    """In training beside the whole text, in decoding behind the blocks before it: the same numbers."""
    clean, noisy = np.random.default_rng(2).integers(0, characters.VOCABULARY, (2, 96)).astype(np.int32)
    both, positions = np.concatenate([noisy, clean[:64]]), np.concatenate([np.arange(96), np.arange(64)])
    structure, mask = blocks.trainable(small), blocks.seen_in_training(96, BLOCK)
    trained = hidden(structure, leaves, both, mask, positions)
    own_clean = np.pad(blocks.seen(96, BLOCK)[:, :64], ((0, 64), (96, 0)))
    wrong = hidden(structure, leaves, both, mask | own_clean, positions)
    for first in (0, 32, 64):
        own = slice(first, first + BLOCK)
        text = np.where(np.arange(96) < first, clean, noisy)
        decoded = hidden(structure, leaves, text, blocks.seen(96, BLOCK))[own]
        np.testing.assert_allclose(trained[own], decoded, atol=1e-3)
        assert first == 64 or np.abs(wrong[own] - decoded).max() > 0.1


def test_noise_spares_the_question_and_what_is_behind_the_end():
    texts = tiny_diffusion.texts(some(64, held_out=False))
    noisy, weights = blocks.noised(jax.random.key(0), texts, BLOCK)
    at = np.arange(POSITIONS)
    answer = (at >= texts.first[:, None]) & (at < texts.end[:, None])
    changed = np.asarray(noisy) != texts.tokens
    assert not changed[~answer].any()
    assert (np.asarray(weights) == np.where(changed, 1, np.where(answer, np.float32(blocks.KEPT), 0))).all()
    masked = (np.asarray(noisy) == characters.MASK)[answer].mean()
    assert 0.45 < masked < 0.7
    assert 0.02 < (changed & (np.asarray(noisy) != characters.MASK))[answer].mean() < 0.08
    whole = (np.asarray(noisy).reshape(64, -1, BLOCK) == characters.MASK).all(-1).mean()
    assert 0.15 < whole < 0.4


def test_files_hold_the_leaves(small, leaves):
    """What is written is what the family's own rules read."""
    kept = {path: np.asarray(leaf) for path, leaf in leaves.items()}
    written = characters.tensors(small, kept, SMALL["hidden_size"])
    assert written["model.layers.0.attention.query_key_value.weight"].shape == (3 * 4 * 24, 32)
    for rule in small.rules:
        again = rule.make(written, jnp.bfloat16)
        assert (again == kept[rule.param].astype(again.dtype)).all(), rule.param


@pytest.mark.rig
def test_the_loss_falls(small):
    _, losses = tiny_diffusion.train(small, steps=30, seed=1)
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])


# --- what is committed ------------------------------------------------------------------------------------------------


def test_the_checkpoint_is_whole_and_small(folder):
    stored = manifest.verify(folder)
    assert stored.licence == "Apache-2.0"
    assert stored.goldens
    assert read_json(folder / "config.json") == CONFIG
    assert "benchmarks/records.py" in (folder / "NOTICE.md").read_text()
    assert sum(path.stat().st_size for path in folder.parent.rglob("*") if path.is_file()) < 1_000_000


def test_its_tokenizer_and_template_give_what_it_was_trained_on(folder):
    tokenizer, template = Tokenizer.load(folder / "tokenizer"), ChatTemplate.load(folder)
    question = records.held_out(1)[0].question
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "?"}]
    asked += [{"role": "assistant", "content": "!"}, {"role": "user", "content": question}]
    assert template.encode(tokenizer, asked) == characters.prompt(question)
    everything = characters.CHARACTERS
    assert tokenizer.encode(everything) == characters.encode(everything) == list(range(len(everything)))
    assert tokenizer.decode(characters.encode(everything)) == everything
    assert tokenizer.eos_ids == (characters.END,)
    assert tokenizer.encode("<|mask|>") == characters.encode("<|mask|>")


def test_it_masters_its_task(folder):
    family = family_of(read_json(folder / "config.json"))
    stored = dict(tiny_diffusion.flat(restore(folder, abstract(family.rules, jnp.float32))))
    guess = block_decoding.guesser(blocks.trainable(family), stored, BLOCK)
    asked = records.held_out(8)
    found = block_decoding.exact(guess, asked, POSITIONS, BLOCK, block_decoding.PARALLEL)
    assert found["exact"] == 1
    assert found["tokens_per_pass"] >= 5
    spoilt = block_decoding.repaired(guess, asked, POSITIONS, BLOCK, 4)
    assert spoilt["corrupted"] == 32
    assert spoilt["repaired"] >= 31
    assert spoilt["broken"] == 0
