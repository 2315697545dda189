"""The small files of a Hugging Face checkpoint: which are carried, rewritten or left out."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint
from paddle_reshard.pipeline.checkpoint.files import Sidecars, SourceListing
from paddle_reshard.pipeline.checkpoint.sidecars import classify_sidecars, lacking_files
from paddle_reshard.pipeline.core.file_names import CONFIG
from paddle_reshard.pipeline.core.trainer_files import is_of_adapter, is_training_state
from paddle_reshard.pipeline.formats.huggingface.card import CARD, model_card
from paddle_reshard.pipeline.model.transformers_config import about_code, exported_config, without_code

if TYPE_CHECKING:
    from paddle_reshard.pipeline.formats.huggingface.target import HuggingFaceTarget


UNREAD = "no JSON object that can be read, so nobody knows whether it names code, which is never carried"


def plan_huggingface_sidecars(
    listing: SourceListing,
    wanted: Checkpoint,
    target: HuggingFaceTarget,
) -> Sidecars:
    """Carry what belongs to the model (tokenizer, generation config, …); name what belongs to training.

    ``wanted`` is the source as the target holds it.
    """

    def reason(path: str) -> str | None:
        if path == CARD and target.card:
            return "replaced by the model card that --card writes"
        return of_training(path)

    config, remarks = exported_config(wanted.model.config, target.dtype)
    completion = wanted.history.completion
    if completion is not None:
        config |= completion.config
    named_by, config = config, without_code(config)
    if config != named_by:
        remarks = (about_code(CONFIG), *remarks)
    sidecars = classify_sidecars(listing, wanted.own_files, reason, wanted.source_config, config)
    files = {} if completion is None else completion.files
    donated = tuple((path, name) for name, path in files.items() if name not in sidecars.carried)
    lacking = lacking_files(wanted.model.config, {*sidecars.carried, *(name for _, name in donated)})
    if lacking:
        needed = f"{' and '.join(lacking)} beside the weights, which an inference engine may need; --like DIR takes "
        remarks = (*remarks, f"{needed}them from the model that training began from")
    if target.card:
        content = model_card(wanted, config, target.facts())
        sidecars = sidecars.with_written([(CARD, content)])
    return naming_no_code(replace(sidecars, donated=donated, remarks=remarks), listing)


def naming_no_code(sidecars: Sidecars, listing: SourceListing) -> Sidecars:
    """The same files, written anew without the entries that name code; what cannot be read is not carried."""
    wanted = dict(zip(sidecars.carried, sidecars.carried, strict=True)) | dict(sidecars.donated)
    naming = {path: content for path, content in listing.naming_code.items() if path in wanted}
    written = [(wanted[path], content) for path, content in naming.items() if content is not None]
    unread = [(wanted[path], UNREAD) for path, content in naming.items() if content is None]
    return replace(
        sidecars,
        carried=tuple(path for path in sidecars.carried if path not in naming),
        donated=tuple((path, name) for path, name in sidecars.donated if path not in naming),
        not_carried=(*sidecars.not_carried, *unread),
        remarks=(*sidecars.remarks, *(about_code(name) for name, _ in written)),
    ).with_written(written)


def of_training(path: str) -> str | None:
    """Why an export does not carry a file, if it belongs to the training job."""
    if is_of_adapter(path):
        return "an adapter as only the trainers read it"
    return "state of the training job, not of the model" if is_training_state(path) else None
