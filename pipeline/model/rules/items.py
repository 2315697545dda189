"""The kinds of layers of which a model consists, and the config entries that count them."""

from __future__ import annotations

from dataclasses import dataclass

from paddle_reshard.pipeline.model.rules.entries import Config, config_entry

LAYERS = "num_hidden_layers"
"""Config entry: how many decoder layers there are."""
MTP_LAYERS = "num_nextn_predict_layers"
"""Config entry: how many layers of multi-token prediction (MTP) follow the decoder layers."""
_MTP_ENTRIES = (MTP_LAYERS, "mtp_num_hidden_layers")


def mtp_entry(config: Config) -> str:
    """The config entry that counts the layers of MTP; Qwen3.5 calls it ``mtp_num_hidden_layers``.

    >>> mtp_entry({"text_config": {"mtp_num_hidden_layers": 1}})
    'mtp_num_hidden_layers'
    """
    return next((name for name in _MTP_ENTRIES if config_entry(config, name)), MTP_LAYERS)


@dataclass(frozen=True, slots=True)
class Item:
    """A kind of pipeline item."""

    name: str
    layer_class: str
    """Its class, which a segmentation ``layer:Regex`` matches; empty: the library's pipeline has no such item."""
    repeated: bool = False
    """Whether it is the decoder layer."""
    mtp: bool = False
    """Whether it is a layer of multi-token prediction, or a part of one; ``MTP_LAYERS`` of the config counts them."""
    continues: str | None = None
    """The decoder layer's item, for MTP layers that have its rows too and are numbered after it."""
    inner: str | None = None
    """For an item with ``continues``: the module that has the decoder layer's rows, ``transformer_layer`` in
    ``layers.4.transformer_layer.mlp``; ``None``: the layer itself."""
    there: str | None = None
    """For an item with ``continues``: the beginning of its keys in Hugging Face checkpoints, which have no number of a
    layer, so that there can be only one. It has its own rows, and not those of the decoder layers."""
    built_before: str | None = None
    """The item before which it is built in a job without pipeline stages."""
    count: str | None = None
    """Config entry with the number of such items, or a list of that length; for numbered items but decoder layers."""
    whole: bool = False
    """Whether the pipeline has all its layers in one item, with the rows of one module after those of another."""


@dataclass(frozen=True, slots=True)
class EmptyLayers:
    """Layers without parameters between the items of a pipeline: no key tells of them, but they count in stages."""

    layer_class: str
    """Their class, which a segmentation ``layer:Regex`` matches."""
    after: str
    """Config entry: a list of decoder layers; behind each of them there is one."""
    tail: str
    """Config entry: how many stand behind the last layer, those of MTP included."""
    before: str
    """Name of the item before which those at the tail stand."""
