from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.text.untrusted import Care, Disguise, disguise_for

fixed = settings(derandomize=True, deadline=None, max_examples=200)
CONTROLS = ["<|im_end|>", "<|im_start|>", "[INST]", "EOT"]
strings = st.lists(st.sampled_from([*CONTROLS, "<", "|", "[", "INST]", "EO", "T", "x", " ", "</think>", "é"])).map(
    "".join
)
data = st.recursive(strings, lambda inner: st.lists(inner) | st.dictionaries(strings, inner), max_leaves=4)


@fixed
@given(data, st.sampled_from(Care))
def test_on_and_off(value, care):
    disguise = Disguise(CONTROLS)
    masked = disguise.put_on(value, care)

    def off(part):
        if isinstance(part, str):
            text, places = disguise.take_off(part)
            assert len(text) == len(part)
            assert all(text[place] in "<[E" for place in places)
            return text
        if isinstance(part, list):
            return [off(item) for item in part]
        return {off(key): off(item) for key, item in part.items()}

    assert off(masked) == value
    assert not disguise.holds_control(masked)


@fixed
@given(st.lists(strings, max_size=6), st.sampled_from(Care))
def test_nothing_that_is_joined_makes_a_control_token_of_a_clients_start(parts, care):
    disguise = Disguise(CONTROLS)
    assert not disguise.holds_control("".join(disguise.put_on(parts, care)))


def test_full_care_covers_every_sign():
    disguise = Disguise(CONTROLS)
    _, places = disguise.take_off(disguise.put_on("a<b [c] E <|im_end|> EOT", Care.FULL))
    assert places == {1, 4, 10, 21}
    _, places = disguise.take_off(disguise.put_on("a<b [c] E <|im_end|> EOT", Care.EXACT))
    assert places == {10, 21}


def test_a_control_token_may_be_cut_off_by_the_end():
    disguise = Disguise(CONTROLS)
    for text in ("x<", "x<|im", "x<|im_end|"):
        assert disguise.take_off(disguise.put_on(text, Care.EXACT))[1] == {1}
    assert disguise.take_off(disguise.put_on("x<|in", Care.EXACT))[1] == frozenset()


def test_what_the_template_looks_for_stays_readable():
    disguise = Disguise(CONTROLS, ["</think>", "<|im_end|>", "<|", "<"])
    assert disguise.put_on("</think>", Care.FULL) == "</think>"
    masked = disguise.put_on("<|</think>im_end|>", Care.FULL)
    assert masked[1:] == "|</think>im_end|>"
    assert masked[0] != "<", "a template that removes the word would otherwise complete a control token"
    assert disguise.put_on("<|im_end|>", Care.FULL)[0] != "<"


def test_whether_anything_is_to_be_done():
    disguise = Disguise(CONTROLS)
    assert not disguise.needed([{"role": "user", "content": "hello"}])
    assert disguise.needed([{"role": "user", "content": "a < b"}])
    assert disguise.needed([{"ro<le": 1}])
    assert disguise.holds_control({"a": ["x<|im_end|>"]})
    assert not Disguise([]).needed(["<|im_end|>"])


def test_plain_values_stay():
    assert Disguise(CONTROLS).put_on({"a": [1, None, True, 2.5]}, Care.FULL) == {"a": [1, None, True, 2.5]}


def test_one_disguise_a_vocabulary():
    controls = frozenset(CONTROLS)
    assert disguise_for(controls, frozenset({"</think>"})) is disguise_for(frozenset(CONTROLS), frozenset({"</think>"}))


def test_large_texts_and_vocabularies():
    disguise = Disguise([f"<|reserved_{n}|>" for n in range(5000)])
    text = "<|reserved_" * 50_000
    masked = disguise.put_on(text, Care.FULL)
    assert disguise.take_off(masked) == (text, frozenset(range(0, len(text), 11)))
