"""LM head and cross entropy in chunks of tokens: only one chunk's logits are ever alive."""
