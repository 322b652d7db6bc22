"""LM head and cross entropy in chunks of tokens, so that only one chunk's logits are ever alive."""
