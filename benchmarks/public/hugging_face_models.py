"""Hugging Face's Flax models from configurations (nothing is downloaded), trained as its examples do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.training import train_state
from transformers import (
    BartConfig,
    BertConfig,
    FlaxBartForConditionalGeneration,
    FlaxBertForMaskedLM,
    FlaxGPT2LMHeadModel,
    FlaxLlamaForCausalLM,
    GPT2Config,
    LlamaConfig,
)

from benchmarks.public.program import Sizes, Step, Variant, tokens


class TrainState(train_state.TrainState):
    """Flax's own, with a key for dropout."""

    dropout_rng: Any


def _step_of(model: Any, sizes: Sizes, variant: Variant, *, loss: Callable[..., Any], names: tuple[str, ...]) -> Step:
    """`names`: of the model's arguments that the batch's arrays are; the last array is labels."""
    if variant.checkpoint:
        model.enable_gradient_checkpointing()
    optimizer = optax.adamw(1e-3, weight_decay=0.01)
    batch = tuple(tokens(sizes) for _ in (*names, "labels"))

    def init(key: jax.Array) -> Any:
        params_key, dropout_key = jax.random.split(key)
        params = model.init_weights(params_key, (1, sizes.length))
        return TrainState.create(apply_fn=model.__call__, params=params, tx=optimizer, dropout_rng=dropout_key)

    def train_step(state: TrainState, *batch: Any) -> Any:
        dropout_rng, new_dropout_rng = jax.random.split(state.dropout_rng)

        def loss_fn(params: Any) -> Any:
            inputs = dict(zip(names, batch[:-1], strict=True))
            logits = state.apply_fn(**inputs, params=params, dropout_rng=dropout_rng, train=True)[0]
            return loss(logits, batch[-1])

        value, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads, dropout_rng=new_dropout_rng), {"loss": value}

    def eval_step(params: Any, *batch: Any) -> Any:
        logits = model(**dict(zip(names, batch[:-1], strict=True)), params=params, train=False)[0]
        return {"loss": loss(logits, batch[-1]), "accuracy": jnp.mean(jnp.argmax(logits, -1) == batch[-1])}

    if variant.evaluation:
        return Step(eval_step, lambda key: init(key).params, batch, sizes.vocabulary, training=False)
    return Step(train_step, init, batch, sizes.vocabulary)


def _masked(logits: Any, labels: Any) -> Any:
    """Over labels that are divisible by 7, in the place of a collator's choice."""
    chosen = jnp.where(labels % 7 == 0, 1.0, 0.0)
    losses = optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, logits.shape[-1])) * chosen
    return losses.sum() / chosen.sum()


def _shifted(logits: Any, labels: Any) -> Any:
    """Of the next token."""
    return optax.softmax_cross_entropy_with_integer_labels(logits[..., :-1, :], labels[..., 1:]).mean()


def _smoothed(logits: Any, labels: Any) -> Any:
    soft = optax.smooth_labels(jax.nn.one_hot(labels, logits.shape[-1]), 0.1)
    return optax.softmax_cross_entropy(logits, soft).mean()


def bert(sizes: Sizes, variant: Variant) -> Step:
    """Post-norm, masked language modelling."""
    config = BertConfig(
        vocab_size=sizes.vocabulary, hidden_size=sizes.width, num_hidden_layers=variant.layers,
        num_attention_heads=sizes.heads, intermediate_size=sizes.hidden, max_position_embeddings=sizes.length,
    )  # fmt: skip
    model = FlaxBertForMaskedLM(config, input_shape=(1, sizes.length), dtype=sizes.dtype, _do_init=False)
    return _step_of(model, sizes, variant, loss=_masked, names=("input_ids",))


def gpt2(sizes: Sizes, variant: Variant) -> Step:
    """Pre-norm with dropout, causal."""
    config = GPT2Config(
        vocab_size=sizes.vocabulary, n_embd=sizes.width, n_layer=variant.layers, n_head=sizes.heads,
        n_inner=sizes.hidden, n_positions=sizes.length,
    )  # fmt: skip
    model = FlaxGPT2LMHeadModel(config, input_shape=(1, sizes.length), dtype=sizes.dtype, _do_init=False)
    return _step_of(model, sizes, variant, loss=_shifted, names=("input_ids",))


def llama(sizes: Sizes, variant: Variant) -> Step:
    """RMSNorm, rotations, gated MLPs."""
    config = LlamaConfig(
        vocab_size=sizes.vocabulary, hidden_size=sizes.width, num_hidden_layers=variant.layers,
        num_attention_heads=sizes.heads, intermediate_size=sizes.hidden, max_position_embeddings=sizes.length,
    )  # fmt: skip
    model = FlaxLlamaForCausalLM(config, input_shape=(1, sizes.length), dtype=sizes.dtype, _do_init=False)
    return _step_of(model, sizes, variant, loss=_shifted, names=("input_ids",))


def bart(sizes: Sizes, variant: Variant) -> Step:
    """Encoder and decoder, half of the layers each, post-norm, smoothed labels."""
    layers = variant.layers // 2
    config = BartConfig(
        vocab_size=sizes.vocabulary, d_model=sizes.width, encoder_layers=layers, decoder_layers=layers,
        encoder_attention_heads=sizes.heads, decoder_attention_heads=sizes.heads, encoder_ffn_dim=sizes.hidden,
        decoder_ffn_dim=sizes.hidden, max_position_embeddings=sizes.length,
    )  # fmt: skip
    shape: Any = (1, sizes.length)  # their annotation says of one number
    model = FlaxBartForConditionalGeneration(config, input_shape=shape, dtype=sizes.dtype, _do_init=False)
    return _step_of(model, sizes, variant, loss=_smoothed, names=("input_ids", "decoder_input_ids"))
