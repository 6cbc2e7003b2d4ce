"""Packed weights: what their bits stand for, which leaves they become, and that products read them as plain ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from jaxserve.axes import MeshShape, split
from jaxserve.decode import jitted
from jaxserve.errors import CheckpointError
from jaxserve.models import quant
from jaxserve.models.experts import ExpertWeights, routed
from jaxserve.models.family import family_of
from jaxserve.models.layers import GLUS
from jaxserve.models.passes import Routing
from jaxserve.models.quant import FP8, MXFP4, Packed, PackedParameter, held, quantisation_from_hf
from jaxserve.models.weights import Piece, Rule, nest, params_of, rule
from jaxserve.plan import WeightShape
from jaxserve.testing import TINY, random_params

E2M1 = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
EXPERT_OUT = ("experts", "model", "ffn")
E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
FP8_HF = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}


def unpacked(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """By the table: the even element is the lower half of a byte."""
    numbers = np.stack([E2M1[values & 15], E2M1[values >> 4]], -1).reshape(*values.shape[:-1], -1)
    whole = np.ldexp(numbers.astype(np.float64), scales[..., None].astype(np.int32) - 127)
    return whole.astype(np.float32).reshape(*scales.shape[:-1], -1)


def encoded(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The nearest that four bits and a power of two for each 32 numbers can hold."""
    blocks = numbers.reshape(*numbers.shape[:-1], -1, 32)
    exponents = np.frexp(np.abs(blocks).max(-1))[1] - 3
    codes = np.abs(blocks[..., None] / np.ldexp(1.0, exponents)[..., None, None] - E2M1).argmin(-1).astype(np.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, (exponents + 127).astype(np.uint8)


def numbers(values: np.ndarray, scales: np.ndarray, dtype=jnp.float32) -> np.ndarray:
    return np.asarray(Packed(jnp.asarray(values.view(np.uint8)), jnp.asarray(scales)).dense(dtype), np.float32)


@pytest.fixture(params=["this platform", "any platform"])
def forms(request, monkeypatch):
    """Unpacks as a CPU does, then as all others do."""
    if request.param == "any platform":
        monkeypatch.setattr(quant, "_e2m1_on_cpu", quant._e2m1)
        monkeypatch.setattr(quant, "_e4m3_on_cpu", quant._e4m3)


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


# --- bits -------------------------------------------------------------------------------------------------------------


def test_every_byte_under_every_exponent(forms):
    values = np.broadcast_to(np.arange(256, dtype=np.uint8).reshape(16, 16), (252, 16, 16))
    scales = np.broadcast_to(np.arange(1, 253, dtype=np.uint8)[:, None], (252, 16))  # beyond, float32 ends
    expected = unpacked(values, scales)
    normal = (np.abs(expected) >= np.finfo(np.float32).tiny) | (expected == 0)  # a device may flush what is smaller
    np.testing.assert_array_equal(numbers(values, scales)[normal], expected[normal])
    assert normal.mean() > 0.99
    swapped = unpacked(values >> 4 | values << 4, scales)
    assert (swapped != expected).mean() > 0.9


def test_what_four_bits_can_hold_comes_back(forms):
    exact = E2M1[np.random.default_rng(1).integers(0, 16, (3, 5, 64))] * np.float32(2.0**-3)
    exact[..., ::32] = 6 * 2.0**-3  # so that the block's exponent is the one it was made with
    np.testing.assert_array_equal(numbers(*encoded(exact)), exact)
    np.testing.assert_array_equal(numbers(*encoded(exact), jnp.bfloat16), exact)  # two bits fit into seven
    weights = draw(4, 96)
    assert np.abs(numbers(*encoded(weights)) - weights).max() < np.abs(weights).max() / 4  # 6 stands for up to 8


def test_no_number_is_no_number(forms):
    assert not np.isfinite(numbers(np.full((1, 16), 0x11, np.uint8), np.uint8([255]))).any()


def test_every_e4m3_number_under_a_factor(forms):
    values = np.broadcast_to(E4M3[np.isfinite(E4M3.astype(np.float32))], (3, 2, 254))
    scales = draw(3, 2)
    expected = (values.astype(np.float32) * scales[..., None]).reshape(3, -1)
    np.testing.assert_array_equal(numbers(values, scales), expected)
    rounded = np.asarray(expected.astype(ml_dtypes.bfloat16), np.float32)
    np.testing.assert_array_equal(numbers(values, scales, jnp.bfloat16), rounded)


# --- rules ------------------------------------------------------------------------------------------------------------


def blocks(shape: tuple[int, int], block: tuple[int, int], seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A matrix in fp8, the factors of its blocks, and what the two stand for."""
    values = draw(*shape, seed=seed).astype(ml_dtypes.float8_e4m3fn)
    count = tuple(-(-size // each) for size, each in zip(shape, block, strict=True))
    scales = np.exp(draw(*count, seed=seed + 1))
    spread = scales.repeat(block[0], 0)[: shape[0]].repeat(block[1], 1)[:, : shape[1]]
    return values, scales, values.astype(np.float32) * spread


def joined(d: int) -> Rule:
    """Two query heads and a key for each of three key heads, of 20 rows each."""
    q = Piece("layers.0.q.weight", (3, 2, 20, d), (), ((0, 3), (0, 2)))
    k = Piece("layers.0.k.weight", (3, 1, 20, d), (), ((0, 3), (2, 3)))
    return Rule("layers.0.mixer.qkv.kernel", (3, 3, 20, d), ("kv_heads", None, None, "model"), ((q, k),))


def alternating(d: int) -> Rule:
    """Rows in another order, cut out of a taller tensor."""
    piece = Piece("layers.0.q.weight", (8, 2, d), (1, 0, 2), (), (37, 53))
    return Rule("layers.0.mixer.q.kernel", (2, 8, d), ("heads", None, None), ((piece,),))


def output(d: int) -> Rule:
    """Inputs of two axes."""
    return rule("layers.0.mixer.o.kernel", "layers.0.q.weight", (120, 4, d // 4), ("model", "heads", None))


@pytest.mark.parametrize("block", [(32, 32), (16, 64), (128, 128)])
@pytest.mark.parametrize("d", [64, 80, 128])
@pytest.mark.parametrize("make", [joined, alternating, output])
def test_blocks_of_joined_and_reordered_tensors(make, d, block):
    whole = make(d)
    parts = {"layers.0.q.weight": blocks((120, d), block, 1), "layers.0.k.weight": blocks((60, d), block, 3)}
    files = {name: values for name, (values, _, _) in parts.items()}
    files |= {f"{name}_scale_inv": scales for name, (_, scales, _) in parts.items()}
    values, scales = FP8(block).leaves(whole)
    assert (values.dtype, scales.dtype) == ("float8_e4m3fn", "float32")
    assert values.axes[:-1] == scales.axes
    assert values.shape[:-1] == scales.shape
    for leaf in (values, scales):
        for piece in leaf.pieces(files):
            assert piece.part(files[piece.source].shape) is not None
    got = numbers(values.make(files, np.float32), scales.make(files, np.float32)).reshape(whole.shape)
    expected = whole.make({name: plain for name, (_, _, plain) in parts.items()}, np.float32)
    np.testing.assert_array_equal(got, expected)
    for wrong in (lambda s: 1 / s, lambda s: np.roll(s, 1, -1 if s.shape[-1] > 1 else -2)):
        bad = files | {name: wrong(leaf) for name, leaf in files.items() if name.endswith("_inv")}
        if any((bad[name] != files[name]).any() for name in bad):  # a single block has no neighbour
            other = numbers(values.make(files, np.float32), scales.make(bad, np.float32)).reshape(whole.shape)
            assert (other != expected).mean() > 0.3


def test_factors_of_another_shape_do_not_fit():
    _, scales = FP8((32, 32)).leaves(joined(64))
    piece = scales.ways[0][0]
    assert piece.part((4, 2)) == (120, 2)
    assert [piece.part(shape) for shape in ((3, 2), (5, 2), (4, 3), (4,), (), (4, 2, 1))] == [None] * 6


def test_packed_experts_put_the_inputs_last():
    """Of an expert that files of plain numbers hold ``[in, out]``, gate and up rows alternating."""
    e, d, f = 3, 64, 40
    plain = Rule(
        "layers.0.ffn.gate_up",
        (e, 2, f, d),
        ("experts", None, "ffn", "model"),
        ((Piece("x.experts.gate_up_proj", (e, d, f, 2), (0, 3, 2, 1)),),),
    )
    values, scales = encoded(draw(e, 2 * f, d))
    exact = unpacked(values, scales)  # [e, 2f, d]
    files = {"x.experts.gate_up_proj_blocks": values, "x.experts.gate_up_proj_scales": scales}
    expected = plain.make({"x.experts.gate_up_proj": exact.swapaxes(1, 2)}, np.float32)
    leaves = MXFP4().leaves(plain)
    assert [leaf.dtype for leaf in leaves] == ["uint8", "uint8"]
    got = numbers(*(leaf.make(files, np.float32) for leaf in leaves))
    np.testing.assert_array_equal(got.reshape(plain.shape), expected)
    bias = rule("layers.0.ffn.gate_up_bias", "x.experts.gate_up_proj_bias", (e, 2, f), ("experts", None, "ffn"))
    assert MXFP4().leaves(bias) == (bias,)


@pytest.mark.parametrize("f", [96, 128, 160, 768])
@pytest.mark.parametrize("quantisation", [MXFP4(), FP8((128, 128))])
def test_a_mesh_divides_both_products_of_experts_or_none(quantisation, f):
    e, d = 4, 64
    shapes = {"gate_up": ((e, 2, f, d), ("experts", None, "ffn", "model")), "down": ((e, d, f), EXPERT_OUT)}
    names = {"gate_up": "x.experts.gate_up_proj", "down": "x.experts.down_proj"}
    suffix = "" if quantisation == MXFP4() else ".weight"
    for tensor in (2, 4, 8):
        parts = {
            leaf.param: split(leaf.axes, leaf.shape, MeshShape(1, tensor))[2]
            for name, (shape, axes) in shapes.items()
            for leaf in quantisation.leaves(rule(f"layers.0.ffn.{name}", names[name] + suffix, shape, axes))
        }
        assert len(parts) == 4
        assert len(set(parts.values())) == 1


def test_which_leaves_are_quantised():
    excepted = ["model.layers.1", "down_proj", "model.language_model.layers.0.*.o_proj"]
    hf = TINY | {"quantization_config": FP8_HF | {"modules_to_not_convert": excepted}}
    rules = family_of(hf).rules
    quantised = {one.param.removesuffix(".values") for one in rules if one.dtype == "float8_e4m3fn"}
    assert quantised == {"layers.0.mixer.qkv.kernel", "layers.0.ffn.gate_up.kernel"}
    everywhere = family_of(TINY | {"quantization_config": FP8_HF}).rules
    assert sum(one.dtype == "float8_e4m3fn" for one in everywhere) == 8
    assert {one.dtype for one in everywhere if not one.param.startswith("layers.")} == {None}


def test_a_product_of_both_kinds_is_refused():
    hf = TINY | {"quantization_config": FP8_HF | {"modules_to_not_convert": ["model.layers.0.self_attn.k_proj"]}}
    with pytest.raises(CheckpointError, match=r"k_proj.weight is no fp8, .*q_proj.weight is"):
        _ = family_of(hf).rules


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"quant_method": "gptq"}, "'gptq'"),
        ({}, "None"),
        (FP8_HF | {"weight_block_size": None}, "without blocks"),
        (FP8_HF | {"weight_block_size": [128, 0]}, "without blocks"),
        (FP8_HF | {"fmt": "e5m2"}, "e5m2"),
        ("fp8", "no attribute"),
    ],
)
def test_other_forms_are_refused_by_name(fields, named):
    if not fields:
        fields = {"bits": 4}
    with pytest.raises(CheckpointError, match=named):
        family_of(TINY | {"quantization_config": fields})


def test_what_configurations_say():
    assert quantisation_from_hf({}) is None
    assert quantisation_from_hf({"quantization_config": {"quant_method": "mxfp4"}}) == MXFP4()
    assert quantisation_from_hf({"quantization_config": FP8_HF}) == FP8((32, 32))


def test_experts_must_divide_into_blocks():
    odd = rule("layers.0.ffn.down", "x.experts.down_proj", (2, 8, 48), ("experts", "model", "ffn"))
    with pytest.raises(CheckpointError, match="48 is no multiple"):
        MXFP4().leaves(odd)


# --- products ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mxfp4", "fp8"])
def test_packed_experts_are_plain_experts_bit_for_bit(kind):
    e, d, f, m, c = 6, 64, 32, 9, 2

    def pack(seed: int, *shape: int) -> Packed:
        weights = draw(*shape, seed=seed) / 8
        if kind == "mxfp4":
            return Packed(*map(jnp.asarray, encoded(weights)))
        wide = weights.reshape(*shape[:-1], -1, 16).astype(ml_dtypes.float8_e4m3fn)
        return Packed(jnp.asarray(wide.view(np.uint8)), jnp.asarray(np.exp(draw(*wide.shape[:-1], seed=seed))))

    packed = ExpertWeights(pack(1, e, 2, f, d), pack(2, e, d, f))
    plain = ExpertWeights(packed.gate_up.dense(jnp.float32), packed.down.dense(jnp.float32))
    x, weights = jnp.asarray(draw(m, d, seed=3)), jnp.asarray(np.abs(draw(m, c, seed=4)))
    chosen = jnp.asarray(np.stack([np.random.default_rng(i).permutation(e)[:c] for i in range(m)]), jnp.int32)
    blocks = Routing(native=False)  # packed kernels are always multiplied in blocks
    run = jax.jit(lambda experts: routed(x, chosen, weights, experts, GLUS["silu"], routing=blocks))
    np.testing.assert_array_equal(run(packed), run(plain))
    assert np.abs(run(packed)).max() > 0.1


def test_a_packed_model_is_the_plain_one_bit_for_bit():
    family, plain = family_of(TINY | {"quantization_config": FP8_HF}), family_of(TINY)
    params = random_params(family)
    model = nnx.merge(family.graphdef(jnp.float32), params)
    assert isinstance(model.layers[1].ffn.down.kernel, PackedParameter)
    assert held(model.layers[1].ffn.down.kernel).values.dtype == jnp.uint8
    leaves = {}
    for one in plain.rules:
        node = model
        for name in one.param.split("."):
            node = node[int(name)] if name.isdecimal() else getattr(node, name)
        leaves[one.param] = node[...]
    tokens = jnp.arange(40, dtype=jnp.int32)[None]
    packed_logits = jitted.logits(family.graphdef(jnp.float32), params, tokens)
    plain_logits = jitted.logits(plain.graphdef(jnp.float32), params_of(nest(leaves)), tokens)
    np.testing.assert_array_equal(packed_logits, plain_logits)
    assert np.ptp(np.asarray(packed_logits)) > 1


def test_the_plan_counts_what_lies_in_memory():
    family = family_of(TINY | {"quantization_config": FP8_HF})
    sizes = {rule.param: np.empty(rule.shape, rule.held(np.float32)).nbytes for rule in family.rules}
    assert {one.param: one.bytes(4) for one in family.shape.weights} == sizes
    assert sizes["layers.0.ffn.down.kernel.values"] == 32 * 64
    assert sizes["layers.0.ffn.down.kernel.scales"] == 32 * 2 * 4


def test_the_plan_counts_the_models_own_numbers():
    assert family_of(TINY | {"quantization_config": FP8_HF}).shape.parameters == family_of(TINY).shape.parameters
    packed = rule("layers.0.ffn.down", "x.experts.down_proj", (2, 8, 64), ("experts", "model", "ffn"))
    leaves = [WeightShape(one.param, one.shape, one.axes, one.dtype) for one in MXFP4().leaves(packed)]
    assert sum(leaf.parameters for leaf in leaves) == 2 * 8 * 64
    assert sum(leaf.bytes(2) for leaf in leaves) == 2 * 8 * 64 * 17 // 32
