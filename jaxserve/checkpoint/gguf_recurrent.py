"""What GGUF's converter does to layers with a memory (Gated DeltaNet): names, and the order of their value heads.

Files of Hugging Face keep the value heads of a key head together. GGUF deals them out, the first of each key head, then
the second of each: in the value rows of the joined product and of the convolution, in the gates, in the columns of the
output. It stores the decay's rate as -e^rate, and every norm but the one behind the memory as 1 + w. Source:
``conversion/qwen.py`` of llama.cpp.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from jaxserve.errors import CheckpointError

Undo = Callable[[NDArray[Any]], NDArray[Any]]

# Block tensors, GGUF to Hugging Face, each with the same ending in both.
NAMES: Final = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
WHOLE_NAMES: Final = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}
PLAIN_NORM: Final = "ssm_norm.weight"


@dataclasses.dataclass(frozen=True, slots=True)
class ValueHeads:
    """The heads of a file's layers with a memory."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int

    def undo(self, tensor: str) -> Undo | None:
        """How the values of a block tensor (its GGUF name behind ``blk.N.``) become those of the original."""
        name = tensor.partition(".")[0]
        if name in ("attn_qkv", "ssm_conv1d"):
            return self._behind_keys
        if name == "attn_gate":
            return lambda array: self._together(array, self.value_size)
        if name in ("ssm_alpha", "ssm_beta", "ssm_dt"):
            return lambda array: self._together(array, 1)
        if name == "ssm_a":
            return lambda array: self._rate(self._together(array, 1))
        if name == "ssm_out":
            return lambda array: self._together(array.T, self.value_size).T
        return None

    def _together(self, array: NDArray[Any], size: int) -> NDArray[Any]:
        """Rows of ``size`` a value head, those of a key head side by side again."""
        if self.value_heads % self.key_heads or array.shape[0] != self.value_heads * size:
            raise CheckpointError(
                f"{array.shape[0]} rows cannot be those of {self.value_heads} value heads of {size}, "
                f"shared out among {self.key_heads} key heads."
            )
        dealt = array.reshape(-1, self.key_heads, size, *array.shape[1:])
        return dealt.swapaxes(0, 1).reshape(array.shape)

    def _behind_keys(self, array: NDArray[Any]) -> NDArray[Any]:
        keys = 2 * self.key_heads * self.key_size
        return np.concatenate([array[:keys], self._together(array[keys:], self.value_size)])

    @staticmethod
    def _rate(array: NDArray[Any]) -> NDArray[Any]:
        with np.errstate(invalid="ignore", divide="ignore"):  # what is no number is refused where it is stored
            return np.log(-array)
