"""Count the parameters of a configuration, part by part. Imports no torch."""

from __future__ import annotations

from recollect.lab.models.config_fields import TransformerFields

__all__ = ["active_parameters", "all_parameters"]


def all_parameters(config: TransformerFields) -> int:
    """Count the trainable parameters of a model.

    A tied matrix counts once; the biases of auxiliary-loss-free routing are buffers and do not count.
    """
    experts = config.num_moe_experts or 0
    mtp_layer = _layer(config, config.num_layers, experts) + 3 * _norm(config, config.hidden_size)
    mtp_layer += 2 * config.hidden_size**2  # eh_proj maps both norms' outputs to one
    return _decoder(config, experts) + (config.mtp_num_layers or 0) * mtp_layer


def active_parameters(config: TransformerFields) -> int:
    """Count the parameters used to predict one token.

    Of the routed experts, `moe_router_topk` count; multi-token prediction does not. Embeddings count in full, as in published
    figures.
    """
    return _decoder(config, config.moe_router_topk)


def _decoder(config: TransformerFields, experts: int) -> int:
    d = config.hidden_size
    matrices = 1 if config.share_embeddings_and_output_weights else 2
    positions = config.max_position_embeddings if config.position_embedding_type == "learned_absolute" else 0
    layers = sum(_layer(config, index, experts) for index in range(config.num_layers))
    return (matrices * config.vocab_size + positions) * d + layers + _norm(config, d)


def _layer(config: TransformerFields, index: int, experts: int) -> int:
    attention = _latent_attention(config) if config.multi_latent_attention else _attention(config)
    mlp = _experts(config, experts) if config.is_moe_layer(index) else _mlp(config, config.ffn_hidden_size)
    return attention + mlp + 2 * _norm(config, config.hidden_size)


def _norm(config: TransformerFields, channels: int) -> int:
    return 2 * channels if config.normalization == "LayerNorm" else channels


def _attention(config: TransformerFields) -> int:
    d, c = config.hidden_size, config.kv_channels
    qkv = (config.num_attention_heads + 2 * config.num_query_groups) * c
    qkv_bias = qkv if config.add_bias_linear or config.add_qkv_bias else 0
    return d * qkv + qkv_bias + config.num_attention_heads * c * d + (d if config.add_bias_linear else 0)


def _latent_attention(config: TransformerFields) -> int:
    d, heads = config.hidden_size, config.num_attention_heads
    q = heads * (config.qk_head_dim + config.qk_pos_emb_head_dim)
    if config.q_lora_rank is None:
        count = d * q
    else:
        count = (d + q) * config.q_lora_rank + _norm(config, config.q_lora_rank)
    count += d * (config.kv_lora_rank + config.qk_pos_emb_head_dim) + _norm(config, config.kv_lora_rank)
    count += config.kv_lora_rank * heads * (config.qk_head_dim + config.v_head_dim)
    # As in Megatron, only the projection out of the attention may have a bias.
    return count + heads * config.v_head_dim * d + (d if config.add_bias_linear else 0)


def _mlp(config: TransformerFields, width: int) -> int:
    into = (2 if config.gated_linear_unit else 1) * width
    biases = into + config.hidden_size if config.add_bias_linear else 0
    return config.hidden_size * (into + width) + biases


def _experts(config: TransformerFields, experts: int) -> int:
    router = config.hidden_size * (config.num_moe_experts or 0)
    shared = config.moe_shared_expert_intermediate_size
    count = router + experts * _mlp(config, config.moe_ffn_hidden_size)
    return count if shared is None else count + _mlp(config, shared)
