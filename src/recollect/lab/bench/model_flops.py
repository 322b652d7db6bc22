"""Model FLOPs by formula: the arithmetic a training step requires, however it is run. Imports no torch.

A product of [m, k] and [k, n] takes 2mkn FLOPs, and training runs three for each product of forward: one in forward, and one
for the gradient of each factor. Not counted are recompute (neither in plans nor inside attention kernels; hardware FLOPs count
it, see `recollect.lab.bench.measure`), norms, activations and the optimizer.

References:
    D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021, appendix.
    https://arxiv.org/abs/2104.04473. Deviations: masked attention scores are not counted, as in Megatron since 2024 and, where
    stated, in PaLM's appendix B; grouped queries, gates, experts and latent attention count as they are.
    V. Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, appendix A, for the two
    kinds of FLOPs. https://arxiv.org/abs/2205.05198
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recollect.lab.models.config import TransformerConfig


def model_flops(
    config: TransformerConfig, *, num_sequences: int, seq_length: int, attention_fraction: float = 0.5
) -> float:
    """Return the FLOPs of one training step.

    Args:
        config: the model.
        num_sequences: sequences in the step, over all micro-batches.
        seq_length: tokens per sequence.
        attention_fraction: fraction of the [seq, seq] scores that counts: half by a causal mask, with the diagonal counted as
            half; 1 for unfused attention, which computes all of them.

    Returns:
        FLOPs of forward and backward without recompute.

    Example:
        >>> from recollect.lab.models.config import TransformerConfig
        >>> config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=16)
        >>> layer, logits = 2 * 4 * (4 * 8 * 8 + 2 * 8 * 32) + 2 * 2 * 4 * 4 * 8 // 2, 2 * 4 * 8 * 16
        >>> model_flops(config, num_sequences=1, seq_length=4) == 3 * (layer + logits)
        True
    """
    if config.multi_latent_attention:
        channels = config.qk_head_dim + config.qk_pos_emb_head_dim + config.v_head_dim
    else:
        channels = 2 * config.kv_channels
    # Multiply-adds of core attention for one query, over all heads.
    attention = attention_fraction * seq_length * config.num_attention_heads * channels
    depths = config.mtp_num_layers or 0
    layers = range(config.num_layers + depths)
    per_token = sum(config.layer_weights(layer, config.moe_router_topk) + attention for layer in layers)
    per_token += config.vocab_size * config.hidden_size * (1 + depths)
    per_token += depths * 2 * config.hidden_size * config.hidden_size  # each depth joins two streams into one
    return 3.0 * 2 * num_sequences * seq_length * per_token
