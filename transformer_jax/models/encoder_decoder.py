"""What all encoder-decoders do alike: source and target in, logits and attention out, target token by target token."""

from abc import abstractmethod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from transformer_jax.errors import UserError
from transformer_jax.functional.dropout import split
from transformer_jax.layers import Block, Seen, balance_loss
from transformer_jax.models.checks import check_tokens
from transformer_jax.models.decoding_state import DecodingState

Segments = tuple[Int[Array, "B S"], Int[Array, "B T"]]


class AttentionWeights(NamedTuple):
    """The attention weights of every layer of a forward pass."""

    encoder: Float[Array, "L B N S S"]
    decoder: Float[Array, "L B N T T"]
    cross: Float[Array, "L B N T S"]


class EncoderDecoder(nnx.Module):
    """Source and target ids to logits, by the four methods at the end, which a model has to give."""

    config: Any
    pad_id: int

    def __call__(
        self,
        source: Int[Array, "B S"],
        target: Int[Array, "B T"],
        *,
        segments: Segments | None = None,
        dropout_key: Key[Array, "#B"] | None = None,
    ) -> Float[Array, "B T V"]:
        """The logits of each next target token, given the source and the target tokens so far.

        Args:
            source: ids.
            target: ids, of which the first is what targets begin with (the padding id of a T5); position t of the
                result is the prediction for t + 1.
            segments: which pair each source and each target token belongs to, where a row holds several: 1, 2, ... and
                0 for padding. Pairs do not see each other, and positions count from the beginning of each.
            dropout_key: one key per row, or None for no dropout.
        """
        return self.logits_and_balance(source, target, segments=segments, dropout_key=dropout_key)[0]

    def logits_and_balance(
        self,
        source: Int[Array, "B S"],
        target: Int[Array, "B T"],
        *,
        segments: Segments | None = None,
        dropout_key: Key[Array, "#B"] | None = None,
    ) -> tuple[Float[Array, "B T V"], Float[Array, ""]]:
        """The logits, and what unevenly used experts add to the sum of the losses."""
        self._check_decoder(source=source, target=target, source_segments=segments and segments[0])
        encoder_key, decoder_key = split(dropout_key, 2)
        memory, encoder = self._encode(source, segments, encoder_key)
        x, decoder = self._decode(target, memory, source, segments, decoder_key)
        experts = self.config.experts
        balance = balance_loss(encoder.balance, experts) + balance_loss(decoder.balance, experts)
        return self.logits(x), balance

    def hidden(self, source: Int[Array, "B S"], target: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """A vector for each target token: what the logits are made of."""
        self._check_decoder(source=source, target=target)
        return self._decode(target, self.encode(source), source)[0]

    def encode(self, source: Int[Array, "B S"]) -> Float[Array, "B S D"]:
        """A vector for each source token: what the decoder reads."""
        check_tokens(source=source)
        return self._encode(source)[0]

    def attention(self, source: Int[Array, "B S"], target: Int[Array, "B T"]) -> AttentionWeights:
        """What attends to what, in every layer and head of the same pass."""
        self._check_decoder(source=source, target=target)
        memory, encoder = self._encode(source, watch=True)
        _, decoder = self._decode(target, memory, source, watch=True)
        return AttentionWeights(encoder.own, decoder.own, decoder.memory)  # type: ignore[arg-type]

    def start(self, source: Int[Array, "B S"], length: int) -> DecodingState:
        """Read the source and make room for `length` target tokens, to be given to `decode`."""
        self._check_decoder(source=source)
        memory = self.encode(source)
        known = jax.vmap(lambda block: block.cross_attention.project(memory))(self._decoder_blocks())
        num_layers, num_rows, _, num_heads, head_size = known.key.shape
        shape = (num_layers, num_rows, length, num_heads, head_size)
        return DecodingState.empty(shape, memory.dtype, memory=known, source_valid=self._valid(source))

    def _check_decoder(self, **arrays: Array | None) -> None:
        """Raise unless there is a decoder and these are token ids."""
        check_tokens(**arrays)
        if not self.config.num_decoder_layers:
            raise UserError("the model is an encoder alone (num_decoder_layers=0); use its `encode`")

    def _valid(self, ids: Int[Array, "B T"]) -> Bool[Array, "B T"]:
        return jnp.not_equal(ids, self.pad_id)

    @abstractmethod
    def decode(self, tokens: Int[Array, "B T"], state: DecodingState) -> tuple[Float[Array, "B T V"], DecodingState]:
        """The logits after each of the T next tokens, and the state after them: `__call__`, piece by piece."""

    @abstractmethod
    def logits(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """The logits of what `hidden` gives."""

    @abstractmethod
    def _encode(
        self, source: Array, segments: Segments | None = None, key: Array | None = None, watch: bool = False
    ) -> tuple[Array, Seen]: ...

    @abstractmethod
    def _decode(
        self,
        target: Array,
        memory: Array,
        source: Array,
        segments: Segments | None = None,
        key: Array | None = None,
        watch: bool = False,
    ) -> tuple[Array, Seen]: ...

    @abstractmethod
    def _decoder_blocks(self) -> Block: ...
