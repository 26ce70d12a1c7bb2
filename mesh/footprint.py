"""What a model weighs and where it may be cut: the inspect child's answer, read by placement."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from mlx_mesh.mesh.partition import split_units
from mlx_mesh.mesh.tensor_units import DividedBytes

WORTH_DIVIDING = 100
"""By tensor an embedding or output head is divided by vocabulary when it is a hundredth of the model or
more: that costs a sum or a gather a token, and saves each rank the others' rows, in memory and in time."""


class LayerFootprint(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one layer. `fixed_state_bytes` is per sequence and independent of context (SSM, conv)."""

    weights_bytes: int
    kv_bytes_per_token: int
    fixed_state_bytes: int = 0
    kv_window: int = 0  # tokens a sliding window keeps; 0 = the whole context
    whole_kv_bytes_per_token: int = 0  # of kv_bytes_per_token, what every tensor rank keeps (latents)
    whole_state_bytes: int = 0  # and of fixed_state_bytes
    kv_group_size: int = 0  # the largest groups its keys and values can be quantised in; 0 = never
    kv_itemsize: int = 0  # and the bytes of one of their numbers
    active_bytes: int = 0  # weights that one token reads, of experts only the chosen ones; 0 = all
    active_parameters: int = 0  # that one token is multiplied with; 0 = unknown


class TensorFootprint(msgspec.Struct, frozen=True, kw_only=True):
    """What tensor sharding can divide, summed over layers. A rank with `u` of `attention_units` and `m` of
    `mlp_units` holds replicated + attention_bytes*u/attention_units + mlp_bytes*m/mlp_units bytes."""

    attention_units: int  # the most ranks that heads divide over
    attention_bytes: int
    mlp_units: int
    mlp_bytes: int
    replicated_bytes: int  # norms, embedding, head and whatever no rule can split
    reason: str = ""  # not empty: tensor sharding is impossible, and why
    replicated_parts: tuple[str, ...] = ()  # names of large parts that stay whole on every rank
    divided: tuple[DividedBytes, ...] = ()  # the divided bytes exactly; () = only the sums above are known
    kv_groups: int = -1  # groups by which the KV cache divides; 0 = whole on every rank, -1 = attention_units
    kv_divided: tuple[DividedBytes, ...] = ()  # keys and values of a token, as far as they are divided
    state_divided: tuple[DividedBytes, ...] = ()  # fixed states of a sequence, likewise
    sums_per_token: int = 0  # collectives of one forward; 0 = unknown, two a layer
    leader_bytes: int = 0  # rank 0 alone holds them: a whole output head, with its norm
    vocabulary_bytes: int = 0  # embeddings and output heads that are divided by vocabulary, in `divided` too
    vocabulary_read_bytes: int = 0  # of them, what a token reads: the output head
    num_lookups: int = 0  # embeddings among them, each of which costs a sum
    logits_bytes: int = 0  # of one token, when the output head is divided: the leader gets all of them
    tower_bytes: int = 0  # rank 0 alone holds them, and no token reads them: see ModelFootprint

    def weights_bytes(self, weights: Sequence[int], rank: int) -> int:
        """What one rank holds of the model, to the byte when `divided` is given."""
        divided = sum(part.of_rank(weights, rank) for part in self.divided)
        return self.replicated_bytes + divided + (0 if rank else self.leader_bytes + self.tower_bytes)

    def kv_parts(self, weights: Sequence[int]) -> list[tuple[int, int]]:
        """Of the keys and values that are divided, the part that each rank has, as (so many, of so many).
        With fewer KV heads than ranks there are copies, and the parts are more than a whole."""
        return self._parts(self.kv_divided, weights)

    def state_parts(self, weights: Sequence[int]) -> list[tuple[int, int]]:
        """The same of fixed states."""
        return self._parts(self.state_divided, weights)

    def _parts(self, parts: Sequence[DividedBytes], weights: Sequence[int]) -> list[tuple[int, int]]:
        if self.divided:
            total = sum(part.total for part in parts)
            if not total:
                return [(1, 1)] * len(weights)
            return [
                (sum(part.of_rank(weights, rank) for part in parts), total) for rank in range(len(weights))
            ]
        groups = self.attention_units if self.kv_groups < 0 else self.kv_groups
        if groups < len(weights):
            return [(1, 1)] * len(weights)
        return [(share, groups) for share in split_units(groups, weights)]


class ModelFootprint(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and legal cuts of a model, read from its config and weight headers; no weight is read."""

    model_type: str
    model_digest: str
    num_layers: int
    layers: tuple[LayerFootprint, ...]
    embedding_bytes: int  # read by the first stage (and by the last one when tied)
    head_bytes: int  # final norm and output head, without a tied embedding
    tied_embedding: bool
    legal_cuts: tuple[int, ...]  # k: a stage may end before layer k; subset of 1..num_layers-1
    cut_reason: str  # why the other cuts are not legal; '' when all are
    hidden_bytes_per_token: int  # what crosses a cut
    context_length: int  # the model's maximum; 0 = unknown
    vocab_size: int
    tensor: TensorFootprint
    every_stage_bytes: int = 0  # part of embedding_bytes that all stages read (per-layer inputs)
    kv_refusal: str = ""  # why no keys and values of this model can be quantised; '' = see the layers
    quantization: str = ""  # "4 bit, groups of 64"; '' = none, or unknown
    media: tuple[str, ...] = ()  # what prompts may hold beside text, see MEDIA_KINDS
    media_refusals: dict[str, str] = {}  # by kind: why not
    tower_bytes: int = 0  # towers and projectors of such models, on rank 0 alone
    alone_reason: str = ""  # why it serves one sequence at a time; '' = many
    whole_reason: str = ""  # why it reads each prompt in one piece; '' = in chunks
    untried_reason: str = ""  # what to know of a family whose media were never compared; '' = they were

    @property
    def weights_bytes(self) -> int:
        layers = sum(layer.weights_bytes for layer in self.layers)
        return self.embedding_bytes + self.head_bytes + layers + self.tower_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(layer.kv_bytes_per_token for layer in self.layers)
