"""Language models of Flax Linen, in the manner of its examples `lm1b` and `wmt`, and of nanodo."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training import train_state

from benchmarks.public.program import Sizes, Step, Variant, cross_entropy, masked_cross_entropy, tokens


class TrainState(train_state.TrainState):
    """Flax's own, with the statistics of batch norms and a key for dropout."""

    batch_stats: Any
    dropout_key: Any


def _warm_adamw() -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 100, 10_000)
    return optax.adamw(schedule, b2=0.98, weight_decay=0.1)


def step_of(
    model: nn.Module, sizes: Sizes, variant: Variant, batch: tuple[jax.ShapeDtypeStruct, ...], loss: Any,
    optimizer: optax.GradientTransformation | None = None, takes: int = 1,
) -> Step:  # fmt: skip
    """`loss(logits, labels)`: a scalar; labels are the last of the batch, of which the model `takes` the first."""

    def init(key: jax.Array) -> TrainState:
        params_key, dropout_key = jax.random.split(key)
        inputs = [jnp.zeros(x.shape, x.dtype) for x in batch[:takes]]
        variables = model.init(params_key, *inputs, train=False)
        state: TrainState = TrainState.create(
            apply_fn=model.apply, params=variables["params"], tx=optimizer or _warm_adamw(),
            batch_stats=variables.get("batch_stats", {}), dropout_key=dropout_key,
        )  # fmt: skip
        return state

    def train_step(state: TrainState, *batch: Any) -> Any:
        dropout_key = jax.random.fold_in(state.dropout_key, state.step)

        def loss_fn(params: Any) -> Any:
            logits, updates = state.apply_fn(
                {"params": params, "batch_stats": state.batch_stats}, *batch[:takes], train=True,
                rngs={"dropout": dropout_key}, mutable=["batch_stats"],
            )  # fmt: skip
            return loss(logits, batch[-1]), (logits, updates.get("batch_stats", {}))

        (value, (logits, statistics)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        state = state.apply_gradients(grads=grads, batch_stats=statistics)
        accuracy = jnp.mean(jnp.argmax(logits, -1) == batch[-1])
        return state, {"loss": value, "accuracy": accuracy}

    def eval_step(variables: Any, *batch: Any) -> Any:
        logits: Any = model.apply(variables, *batch[:takes], train=False)
        return {"loss": loss(logits, batch[-1]), "accuracy": jnp.mean(jnp.argmax(logits, -1) == batch[-1])}

    def init_variables(key: jax.Array) -> Any:
        state = init(key)
        return {"params": state.params, "batch_stats": state.batch_stats}

    if variant.evaluation:
        return Step(eval_step, init_variables, batch, sizes.vocabulary, training=False)
    return Step(train_step, init, batch, sizes.vocabulary)


# --- Transformers in the manner of lm1b and wmt -------------------------------------------------------------------


class Mlp(nn.Module):
    """Two dense layers, dropout after each."""

    hidden: int
    rate: float
    activation: Any
    dtype: Any

    @nn.compact
    def __call__(self, x: Any, deterministic: bool) -> Any:
        """[examples, tokens, width]."""
        width = x.shape[-1]
        x = self.activation(nn.Dense(self.hidden, dtype=self.dtype)(x))
        x = nn.Dropout(self.rate)(x, deterministic=deterministic)
        x = nn.Dense(width, dtype=self.dtype)(x)
        return nn.Dropout(self.rate)(x, deterministic=deterministic)


class Block(nn.Module):
    """Pre-norm: attention to itself, to an encoder's result if there is one, and an MLP."""

    sizes: Sizes
    rate: float = 0.1
    activation: Any = nn.relu
    deterministic: bool = False

    @nn.compact
    def __call__(self, x: Any, mask: Any = None, encoded: Any = None, encoded_mask: Any = None) -> Any:
        """[examples, tokens, width]."""
        dtype, heads, deterministic = self.sizes.dtype, self.sizes.heads, self.deterministic
        attention = functools.partial(
            nn.MultiHeadDotProductAttention, num_heads=heads, dtype=dtype, use_bias=False, dropout_rate=self.rate,
            broadcast_dropout=False, deterministic=deterministic,
        )  # fmt: skip
        y = nn.LayerNorm(dtype=dtype)(x)
        y = attention()(y, mask=mask)
        y = nn.Dropout(self.rate)(y, deterministic=deterministic)
        x = x + y
        if encoded is not None:
            y = nn.LayerNorm(dtype=dtype)(x)
            y = attention()(y, encoded, mask=encoded_mask)
            y = nn.Dropout(self.rate)(y, deterministic=deterministic)
            x = x + y
        y = nn.LayerNorm(dtype=dtype)(x)
        return x + Mlp(self.sizes.hidden, self.rate, self.activation, dtype)(y, deterministic)


def _shift_right(x: Any) -> Any:
    return jnp.pad(x, ((0, 0), (1, 0)))[:, :-1]


class LanguageModel(nn.Module):
    """Decoder of padded sentences, as `lm1b`: targets are the inputs."""

    sizes: Sizes
    variant: Variant

    @nn.compact
    def __call__(self, inputs: Any, train: bool) -> Any:
        """Logits [examples, tokens, vocabulary]."""
        sizes, dtype = self.sizes, self.sizes.dtype
        mask = nn.combine_masks(
            nn.make_attention_mask(inputs > 0, inputs > 0, dtype=dtype), nn.make_causal_mask(inputs, dtype=dtype)
        )
        x = nn.Embed(sizes.vocabulary, sizes.width)(_shift_right(inputs))
        x = x + self.param("positions", nn.initializers.normal(0.02), (1, sizes.length, sizes.width))
        x = nn.Dropout(0.1)(x, deterministic=not train).astype(dtype)
        block = nn.remat(Block) if self.variant.checkpoint else Block
        for n in range(self.variant.layers):
            x = block(sizes, deterministic=not train, name=f"block_{n}")(x, mask)
        x = nn.LayerNorm(dtype=dtype)(x)
        return nn.Dense(sizes.vocabulary, dtype=dtype)(x)


def language_model(sizes: Sizes, variant: Variant) -> Step:
    """As `lm1b`: mean over tokens that are no padding."""

    def loss(logits: Any, inputs: Any) -> Any:
        total, count = masked_cross_entropy(logits, inputs)
        return total / count

    return step_of(LanguageModel(sizes, variant), sizes, variant, (tokens(sizes),), loss)


class Translator(nn.Module):
    """Encoder and decoder over one vocabulary, as `wmt`."""

    sizes: Sizes
    variant: Variant

    @nn.compact
    def __call__(self, inputs: Any, targets: Any, train: bool) -> Any:
        """Logits [examples, tokens, vocabulary]."""
        sizes, dtype = self.sizes, self.sizes.dtype
        embed = nn.Embed(sizes.vocabulary, sizes.width, embedding_init=nn.initializers.normal(1.0))
        block = nn.remat(Block) if self.variant.checkpoint else Block
        layers = self.variant.layers // 2

        def embedded(x: Any, name: str) -> Any:
            x = embed(x) + self.param(name, nn.initializers.normal(0.02), (1, x.shape[1], sizes.width))
            return nn.Dropout(0.1)(x, deterministic=not train).astype(dtype)

        mask = nn.make_attention_mask(inputs > 0, inputs > 0, dtype=dtype)
        x = embedded(inputs, "input_positions")
        for n in range(layers):
            x = block(sizes, deterministic=not train, name=f"encoder_{n}")(x, mask)
        encoded = nn.LayerNorm(dtype=dtype)(x)
        mask = nn.combine_masks(
            nn.make_attention_mask(targets > 0, targets > 0, dtype=dtype), nn.make_causal_mask(targets, dtype=dtype)
        )
        encoded_mask = nn.make_attention_mask(targets > 0, inputs > 0, dtype=dtype)
        y = embedded(_shift_right(targets), "target_positions")
        for n in range(layers):
            y = block(sizes, deterministic=not train, name=f"decoder_{n}")(y, mask, encoded, encoded_mask)
        y = nn.LayerNorm(dtype=dtype)(y)
        return embed.attend(y.astype(jnp.float32)) / jnp.sqrt(y.shape[-1])


def translator(sizes: Sizes, variant: Variant) -> Step:
    """As `wmt`: smoothed labels, half of the layers in the encoder."""

    def loss(logits: Any, targets: Any) -> Any:
        total, count = masked_cross_entropy(logits, targets, smoothing=0.1)
        return total / count

    half = tokens(sizes, sizes.length // 2)
    return step_of(Translator(sizes, variant), sizes, variant, (half, half), loss, takes=2)


# --- nanodo -------------------------------------------------------------------------------------------------------


class DecoderBlock(nn.Module):
    """No biases, no dropout; softmax in float32."""

    sizes: Sizes

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """[examples, tokens, width]."""
        sizes, dtype = self.sizes, self.sizes.dtype
        size, length = sizes.width // sizes.heads, x.shape[1]
        norm = functools.partial(nn.LayerNorm, dtype=dtype, use_bias=False)
        heads = functools.partial(nn.DenseGeneral, (sizes.heads, size), use_bias=False, dtype=dtype)
        y = norm()(x)
        query, key, value = heads(name="query")(y), heads(name="key")(y), heads(name="value")(y)
        scores = jnp.einsum("...qhd,...khd->...hqk", query / size**0.5, key).astype(jnp.float32)
        allowed = jnp.tril(jnp.ones((1, 1, length, length), jnp.bool_))
        weights = jax.nn.softmax(jnp.where(allowed, scores, jnp.finfo(dtype).min), axis=-1).astype(dtype)
        mixed = jnp.einsum("...hqk,...khd->...qhd", weights, value)
        x = x + nn.DenseGeneral(sizes.width, axis=(-2, -1), use_bias=False, dtype=dtype, name="out")(mixed)
        y = jax.nn.gelu(nn.Dense(sizes.hidden, use_bias=False, dtype=dtype)(norm()(x)))
        return x + nn.Dense(sizes.width, use_bias=False, dtype=dtype)(y)


class _Round(nn.Module):
    sizes: Sizes
    checkpoint: bool

    @nn.compact
    def __call__(self, x: Any, _: None) -> Any:
        block = nn.remat(DecoderBlock, prevent_cse=False) if self.checkpoint else DecoderBlock
        return block(self.sizes)(x), None


class Decoder(nn.Module):
    """Tied embeddings, logits in float32."""

    sizes: Sizes
    variant: Variant

    @nn.compact
    def __call__(self, inputs: Any, train: bool) -> Any:
        """Logits [examples, tokens, vocabulary]."""
        sizes, variant = self.sizes, self.variant
        embed = nn.Embed(sizes.vocabulary, sizes.width)
        x = embed(inputs) + nn.Embed(sizes.length, sizes.width)(jnp.arange(inputs.shape[1])[None])
        if variant.scan:
            layers = nn.scan(_Round, variable_axes={"params": 0}, split_rngs={"params": True}, length=variant.layers)
            x, _ = layers(sizes, variant.checkpoint)(x.astype(sizes.dtype), None)
        else:
            block = nn.remat(DecoderBlock) if variant.checkpoint else DecoderBlock
            for _ in range(variant.layers):
                x = block(sizes)(x)
        x = nn.LayerNorm(dtype=sizes.dtype, use_bias=False)(x)
        return embed.attend(x.astype(jnp.float32))


def decoder(sizes: Sizes, variant: Variant, optimizer: optax.GradientTransformation | None = None) -> Step:
    """As nanodo: the next token."""
    batch = (tokens(sizes), tokens(sizes))
    return step_of(Decoder(sizes, variant), sizes, variant, batch, cross_entropy, optimizer)


def nanodo_optimizer() -> optax.GradientTransformation:
    """Its default: every optimizer is in MultiSteps, here of one step."""
    steps = optax.MultiSteps(_warm_adamw(), every_k_schedule=1)
    return steps.gradient_transformation()
