"""Text to tokens to batches: corpora, tokenizers, the token store and the order in which tokens are visited."""
