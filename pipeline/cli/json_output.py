"""Results as plain data with stable names, for ``--json`` and scripts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from math import isfinite
from typing import TYPE_CHECKING, Any

from paddle_reshard.pipeline.core.topology import Topology

if TYPE_CHECKING:
    from paddle_reshard.pipeline.convert.conversion import ConversionReport
    from paddle_reshard.pipeline.convert.integrity import IntegrityReport
    from paddle_reshard.pipeline.convert.plan import ConversionPlan
    from paddle_reshard.pipeline.examine.cards import CardsPlan
    from paddle_reshard.pipeline.examine.coverage import Coverage
    from paddle_reshard.pipeline.examine.diff import DifferenceSummary, DiffReport
    from paddle_reshard.pipeline.examine.explanation import Explanation, Origin, Stretch
    from paddle_reshard.pipeline.examine.fingerprint import FingerprintReport
    from paddle_reshard.pipeline.examine.inspection import Inspection
    from paddle_reshard.pipeline.examine.launch import Launch
    from paddle_reshard.pipeline.examine.signing import SignReport
    from paddle_reshard.pipeline.examine.verify import VerifyReport
    from paddle_reshard.pipeline.planning.simulate import Simulation
    from paddle_reshard.pipeline.versions.reports import PublishReport, PullReport

Json = dict[str, Any]


def inspection_data(found: Inspection) -> Json:
    """What ``inspect --json`` prints."""
    return {
        "path": found.path,
        "format": found.format,
        "convention": found.convention,
        "family": found.family,
        "topology": topology_data(found.topology),
        "sharding_strategy": found.sharding_strategy,
        "comm_overlap": found.comm_overlap,
        "sequence_parallel": found.sequence_parallel,
        "ema": found.has_ema,
        "lora": None
        if found.adapter is None
        else {
            "rank": found.adapter.rank,
            "scaling": found.adapter.scaling,
            "base": found.adapter.base,
        },
        "newer": found.newer,
        "unproven": found.unproven,
        "tensor_files": found.tensor_files,
        "tensor_bytes": found.tensor_bytes,
        "states": [asdict(state) for state in found.states],
        "tensors": [
            {
                "key": tensor.key,
                "shape": list(tensor.global_shape),
                "dtype": tensor.dtype.name,
                "tied_to": tensor.tied_to,
                "missing": tensor.missing,
                "rule": tensor.rule.key,
            }
            for tensor in found.tensors
        ],
        "rules": found.rules,
        "stored": [{**asdict(array), "shape": list(array.shape)} for array in found.stored],
        "other_files": list(found.other_files),
    }


def launch_data(found: Launch) -> Json:
    """What ``launch --json`` prints."""
    return {
        "path": found.path,
        "library": found.library,
        "ranks": found.ranks,
        "arguments": dict(found.arguments),
        "commands": list(found.commands),
        "node_command": found.node_command,
        "remarks": list(found.remarks),
    }


def topology_data(topology: Topology | None) -> Json | None:
    """Every axis with its size."""
    return None if topology is None else asdict(topology)


def cards_data(found: CardsPlan) -> Json:
    """What ``plan --cards --json`` prints."""
    return {
        "path": found.path,
        "cards": found.cards,
        "format": found.format,
        "any_topology": found.any_topology,
        "alternatives": [
            {
                "topology": topology_data(one.topology),
                "to": str(one.topology),
                "sharding_strategy": one.strategy,
                "sharding_strategy_reason": one.strategy_reason,
                "card_bytes": {
                    "parameters": one.fullest.parameters,
                    "master_weights": one.fullest.master_weights,
                    "moments": one.fullest.moments,
                    "total": one.fullest.on_card,
                },
                "ema_bytes": one.fullest.ema,
                "read_bytes": one.read_bytes,
                "write_bytes": one.written_bytes,
                "seconds": round(one.seconds, 3),
                "lost": [{"name": name, "reason": reason} for name, reason in one.lost],
                "resumes": not one.not_resumed,
                "not_resumed": one.not_resumed,
                "remarks": list(one.remarks),
                "command": one.command,
                "arguments": dict(one.arguments),
                "launch": one.launch_line,
                "nearest": one.nearest,
            }
            for one in found.alternatives
        ],
        "refused": [
            {"topology": topology_data(one.topology), "to": str(one.topology), "reason": one.reason}
            for one in found.refused
        ],
    }


def plan_data(conversion: ConversionPlan) -> Json:
    """What ``plan --json`` prints."""
    plan, targets, completion = conversion.plan, conversion.targets, conversion.source.history.completion
    described = [target.spec.data() for target in targets]
    for data, target in zip(described, targets, strict=True):
        data["not_carried"] = [{"path": path, "reason": reason} for path, reason in target.not_carried]
        data["states_not_carried"] = list(target.states_not_carried)
        data["remarks"] = list(target.remarks)
        data["donated_files"] = list(target.donated)
    for data, location in zip(described, conversion.target_locations, strict=False):
        data["path"] = location
    return {
        "plan_id": conversion.plan_id,
        "portion": None if conversion.portion is None else conversion.portion.data(),
        "source": {
            "format": conversion.source.format,
            "topology": topology_data(conversion.source.job.topology),
            "sharding_strategy": conversion.source.job.strategy,
        },
        "target": described[0] if len(targets) == 1 else None,
        "targets": described,
        "tensors": len(plan.tensors) - plan.compared_only,
        "groups": plan.groups,
        "peak_bytes": plan.peak_bytes,
        "budget_bytes": plan.budget_bytes,
        "read_bytes": plan.read_bytes,
        "read_amplification": round(plan.read_amplification, 4),
        "read_once_budget_bytes": plan.read_once_budget_bytes,
        "write_bytes": plan.written_bytes,
        "copied_bytes": plan.copied_bytes,
        "copied_share": round(plan.copied_share, 4),
        "compared_with_master_weights": dict(zip(("full", "sample"), plan.checked_parameters, strict=True)),
        "master_weights_made": conversion.master_weights_made,
        "filled_tensors": []
        if conversion.source.history.filled is None
        else list(conversion.source.history.filled.tensors),
        "donated_tensors": [] if completion is None else list(completion.tensors),
        "files": [{"path": f.path, "size_bytes": f.size_bytes} for f in plan.stored_files],
        "carried": [{"path": c.target_path, "size_bytes": c.size_bytes} for c in plan.carried],
        "not_carried": [entry for data in described for entry in data["not_carried"]],
        "states_not_carried": sorted({state for target in targets for state in target.states_not_carried}),
        "states_dropped": list(conversion.dropped),
    }


def simulations_data(found: Sequence[Simulation]) -> Json:
    """What ``plan --workers --json`` prints beside the plan; nothing if no estimate was wanted."""
    return {"simulations": [asdict(one) for one in found]} if found else {}


def coverage_data(coverage: Coverage) -> Json:
    """What ``plan --prove --json`` prints under ``coverage``."""
    return {
        "complete": bool(coverage),
        **asdict(coverage),
        "left_out": [asdict(left) for left in coverage.left_out],
        "problems": list(coverage.problems),
    }


def explanation_data(found: Explanation) -> Json:
    """What ``explain --json`` prints."""
    return {
        "source_path": found.source,
        "source": found.source_in_words,
        "target": found.target_in_words,
        "file": found.file,
        "size_bytes": found.size_bytes,
        "tensors": [
            {**asdict(tensor), "shape": list(tensor.shape), "rules": list(tensor.rules)}
            for tensor in found.tensors
        ],
        "stretches": [_stretch_data(stretch) for stretch in found.stretches],
    }


def _stretch_data(stretch: Stretch) -> Json:
    """Bytes ``[start, stop)``; the content of a literal in hexadecimal."""
    return {
        "start": stretch.start,
        "stop": stretch.stop,
        "kind": stretch.kind,
        "content": stretch.content.hex() if stretch.kind == "literal" else None,
        "source_file": stretch.source_file or None,
        "origins": [_origin_data(origin) for origin in stretch.origins],
    }


def _origin_data(origin: Origin) -> Json:
    sides = {
        side: {
            "file": getattr(origin, f"{side}_file"),
            "start": getattr(origin, f"{side}_range")[0],
            "stop": getattr(origin, f"{side}_range")[1],
            "strides": list(getattr(origin, f"{side}_strides")),
            "dtype": getattr(origin, f"{side}_dtype"),
        }
        for side in ("target", "source")
    }
    return {
        "key": origin.key,
        "state": origin.state,
        "offset": list(origin.offset),
        "extents": list(origin.extents),
        **sides,
        "source_state": origin.source_state,
        "rank": dict(origin.rank),
        "how": origin.how,
        "copied": origin.copied,
    }


def conversion_data(report: ConversionReport) -> Json:
    """What ``convert --json`` prints."""
    locations = report.plan.target_locations
    return {
        "source_path": report.source,
        "target_path": locations[0] if len(locations) == 1 else None,
        "moved": asdict(report.moved),
        "plan": plan_data(report.plan),
    }


def verify_data(report: VerifyReport) -> Json:
    """What ``verify --json`` prints."""
    return {
        "equal": report.equal,
        "tensors": report.tensors,
        "compared_elements": report.compared_elements,
        "read_bytes": report.read_bytes,
        "read_amplification": round(report.read_amplification, 4),
        "read_once_budget_bytes": report.read_once_budget_bytes,
        "differences": [asdict(difference) for difference in report.differences],
        "signed_by": report.signed_by,
    }


def sign_data(report: SignReport) -> Json:
    """What ``sign --json`` prints."""
    return {"path": report.path, "signature_path": report.signature, "signed_by": report.signed_by}


def fingerprint_data(report: FingerprintReport) -> Json:
    """What ``fingerprint --json`` prints."""
    found = report.fingerprints
    return {
        "path": report.path,
        "algorithm": "crc64nvme",
        "root": found.root,
        "states": dict(found.states),
        "read_bytes": report.read_bytes,
        "tensors": [
            {
                "key": tensor.key,
                "state": tensor.state,
                "dtype": tensor.dtype.name,
                "shape": list(tensor.global_shape),
                "crc64nvme": f"{int(checksum):016x}",
            }
            for tensor, checksum in zip(found.tensors, found.checksums, strict=True)
        ],
    }


def diff_data(report: DiffReport) -> Json:
    """What ``diff --json`` prints. Figures that are infinite are ``null``."""
    return {
        "agree": report.agree,
        "tensors": report.tensors,
        "elements": report.elements,
        "read_bytes": report.read_bytes,
        "differing": [
            {
                **asdict(found),
                "dtypes": list(found.dtypes),
                "largest": _finite(found.largest),
                "mean": _finite(found.mean),
                "first": list(found.first),
                "values": [_finite(value) for value in found.values],
                "changed_share": found.changed_share,
            }
            for found in report.differing
        ],
        "by_state": [_summary_data(summary) for summary in report.by_state()],
        "by_layer": [_summary_data(summary) for summary in report.by_layer()],
        "unmatched": [asdict(difference) for difference in report.unmatched],
    }


def _summary_data(summary: DifferenceSummary) -> Json:
    return {**asdict(summary), "largest": _finite(summary.largest), "mean": _finite(summary.mean)}


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None


def integrity_data(report: IntegrityReport) -> Json:
    """What ``verify --json`` of one target prints."""
    return {
        "intact": report.intact,
        "files": report.files,
        "parts": report.parts,
        "read_bytes": report.read_bytes,
        "unchecked_bytes": report.unchecked_bytes,
        "recorded_source": report.recorded_source,
        "damages": [asdict(damage) for damage in report.damages],
        "signed_by": report.signed_by,
        "portion": report.portion,
    }


def publish_data(report: PublishReport) -> Json:
    """What ``publish --json`` prints."""
    return {
        "checkpoint_path": report.checkpoint,
        "versions_path": report.versions,
        "version": report.version,
        "full_because": report.reason or None,
        "model_bytes": report.model_bytes,
        "version_bytes": report.version_bytes,
        "tensors": report.tensors,
        "changed_tensors": report.changed_tensors,
        "already_published": report.already,
    }


def pull_data(report: PullReport) -> Json:
    """What ``pull --json`` prints."""
    return {
        "versions_path": report.versions,
        "local_path": report.local,
        "version": report.version,
        "base_version": report.base,
        "files": report.files,
        "written_bytes": report.written_bytes,
        "resumed_bytes": report.resumed_bytes,
    }


def data_of(result: object) -> Json:
    """What ``--json`` prints of the result of a command."""
    data: Json = _OF[type(result).__name__](result)
    return data


_OF: dict[str, Callable[[Any], Json]] = {
    "CardsPlan": cards_data,
    "ConversionReport": conversion_data,
    "DiffReport": diff_data,
    "Explanation": explanation_data,
    "FingerprintReport": fingerprint_data,
    "Inspection": inspection_data,
    "IntegrityReport": integrity_data,
    "Launch": launch_data,
    "PublishReport": publish_data,
    "PullReport": pull_data,
    "Run": asdict,
    "SignReport": sign_data,
    "VerifyReport": verify_data,
}
"""Class of a result → its data. The classes are known by name, because most commands need one of them."""
