"""What an embedding model needs beside its weights."""

from __future__ import annotations

from mlx_mesh.mesh.embedding_memory import BASE_BYTES, MAX_TOKENS, max_tokens_of, working_bytes

MINILM = {
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
}
LONG = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
}


def test_the_prediction_holds_what_was_measured_and_not_twice_as_much() -> None:
    """Peaks of MLX on a CPU, over the weights, with batches as large as there can be."""
    for config, measured in ((MINILM, 116_435_148), (LONG, 365_007_440)):
        predicted = working_bytes(config, max_tokens_of(config, None), keeps_scores=True) - BASE_BYTES
        assert measured <= predicted <= 2 * measured


def test_long_inputs_cost_all_pairs_of_tokens_on_a_cpu_only() -> None:
    config = {**LONG, "num_attention_heads": 16, "max_position_embeddings": 32768}
    assert max_tokens_of(config, None) == MAX_TOKENS
    on_gpu, on_cpu = (working_bytes(config, MAX_TOKENS, keeps_scores=keeps) for keeps in (False, True))
    assert on_cpu - on_gpu == 16 * MAX_TOKENS**2 * 4


def test_what_a_configuration_does_not_say_is_no_zero() -> None:
    assert max_tokens_of({}, None) == MAX_TOKENS and max_tokens_of({}, 128) == 128
    assert working_bytes({"hidden_size": "many"}, 512, keeps_scores=False) > BASE_BYTES
