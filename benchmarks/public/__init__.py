"""Train steps as the users of Flax, Equinox, Haiku and Hugging Face's Flax models write them."""
