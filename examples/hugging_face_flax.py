"""Hugging Face: a Flax BERT from a configuration (nothing is downloaded) and its masked language modelling step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.training import train_state
from transformers import BertConfig, FlaxBertForMaskedLM

import autopar
from examples.common import TIME, VOCABULARY, Example, masked_tokens, run


def build(optimizer: Any = None) -> Example:
    """The mean is over the masked positions, of which each microbatch has another number."""
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=16,
    )
    model = FlaxBertForMaskedLM(config, input_shape=(1, TIME), seed=0)
    state = train_state.TrainState.create(
        apply_fn=model.__call__, params=model.params, tx=optimizer or optax.adamw(1e-3)
    )

    @autopar.parallelize
    def train_step(state: Any, dropout_rng: Any, input_ids: Any, labels: Any) -> Any:
        dropout_rng, new_dropout_rng = jax.random.split(dropout_rng)

        def loss_fn(params: Any) -> Any:
            logits = state.apply_fn(input_ids, params=params, dropout_rng=dropout_rng, train=True)[0]
            label_mask = jnp.where(labels >= 0, 1.0, 0.0)
            loss = optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, VOCABULARY)) * label_mask
            return loss.sum() / label_mask.sum()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), new_dropout_rng, {"loss": loss}

    return Example(train_step, (state, jax.random.PRNGKey(0)), masked_tokens(5))


if __name__ == "__main__":
    run(build)
