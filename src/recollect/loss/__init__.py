"""Output matrix and cross entropy in chunks of tokens, so that the logits of one chunk only are ever alive."""
