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
    """A kind of pipeline item. ``README.md`` says what its fields mean."""

    name: str
    layer_class: str
    repeated: bool = False
    mtp: bool = False
    continues: str | None = None
    inner: str | None = None
    there: str | None = None
    built_before: str | None = None
    count: str | None = None
    whole: bool = False

    def inside(self, key: str) -> str:
        """The key in a layer of this kind of the tensor that has ``key`` in a decoder layer."""
        return key if self.inner is None else key.replace("{layer}.", f"{{layer}}.{self.inner}.", 1)

    def outside(self, key: str) -> str:
        """The key in a decoder layer of the tensor that has ``key`` in a layer of this kind."""
        return key if self.inner is None else key.replace(f"{{layer}}.{self.inner}.", "{layer}.", 1)


@dataclass(frozen=True, slots=True)
class EmptyLayers:
    """Layers without parameters between the items of a pipeline: no key tells of them, but they count in stages."""

    layer_class: str
    after: str
    tail: str
    before: str
