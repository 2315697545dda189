"""Results as plain data with stable names, for ``--json`` and scripts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from math import isfinite
from typing import TYPE_CHECKING, Any

from paddle_reshard.pipeline.core.topology import Topology

if TYPE_CHECKING:
    from paddle_reshard.pipeline.cli import answers
    from paddle_reshard.pipeline.convert.conversion import ConversionReport
    from paddle_reshard.pipeline.convert.integrity import IntegrityReport
    from paddle_reshard.pipeline.convert.plan import ConversionPlan, PlannedTarget
    from paddle_reshard.pipeline.examine.cards import Alternative, CardsPlan
    from paddle_reshard.pipeline.examine.coverage import Coverage
    from paddle_reshard.pipeline.examine.diff import DifferenceSummary, DiffReport
    from paddle_reshard.pipeline.examine.explain import Explanation, Origin
    from paddle_reshard.pipeline.examine.fingerprint import FingerprintReport
    from paddle_reshard.pipeline.examine.inspection import Inspection
    from paddle_reshard.pipeline.examine.verify import VerifyReport

Json = dict[str, Any]


def inspection_data(inspection: Inspection) -> answers.Inspected:
    """What ``inspect --json`` prints."""
    return {
        "path": inspection.path,
        "format": inspection.format,
        "convention": inspection.convention,
        "family": inspection.family,
        "topology": topology_data(inspection.topology),
        "sharding_strategy": inspection.sharding_strategy,
        "comm_overlap": inspection.comm_overlap,
        "sequence_parallel": inspection.sequence_parallel,
        "ema": inspection.has_ema,
        "lora": None
        if inspection.adapter is None
        else {
            "rank": inspection.adapter.rank,
            "scaling": inspection.adapter.scaling,
            "base": inspection.adapter.base,
        },
        "newer": inspection.newer,
        "unproven": "; ".join(filter(None, (inspection.alike, inspection.unproven))),
        "misnamed": inspection.misnamed,
        "tensor_files": inspection.tensor_files,
        "tensor_bytes": inspection.tensor_bytes,
        "states": [asdict(state) for state in inspection.states],
        "tensors": [
            {
                "key": tensor.key,
                "shape": tensor.global_shape,
                "dtype": tensor.dtype.name,
                "tied_to": tensor.tied_to,
                "missing": tensor.missing,
                "rule": tensor.rule.key,
            }
            for tensor in inspection.tensors
        ],
        "rules": inspection.rules,
        "stored": [asdict(array) for array in inspection.stored],
        "other_files": inspection.other_files,
        "left_out": [{"path": path, "reason": reason} for path, reason in inspection.left_out],
    }


def topology_data(topology: Topology | None) -> Json | None:
    """Every axis with its size."""
    return None if topology is None else asdict(topology)


def cards_data(plan: CardsPlan) -> answers.Cards:
    """What ``plan --cards --json`` prints."""
    return {
        "path": plan.path,
        "cards": plan.cards,
        "format": plan.format,
        "any_topology": plan.any_topology,
        "alternatives": [_alternative_data(alternative) for alternative in plan.alternatives],
        "refused": [
            {
                "topology": asdict(refusal.topology),
                "to": str(refusal.topology),
                "reason": refusal.reason,
            }
            for refusal in plan.refused
        ],
    }


def _alternative_data(alternative: Alternative) -> answers.Alternative:
    fullest = alternative.fullest
    return {
        "topology": asdict(alternative.topology),
        "to": str(alternative.topology),
        "sharding_strategy": alternative.strategy,
        "sharding_strategy_reason": alternative.strategy_reason,
        "card_bytes": {
            "parameters": fullest.parameters,
            "master_weights": fullest.master_weights,
            "moments": fullest.moments,
            "total": fullest.on_card,
        },
        "ema_bytes": fullest.ema,
        "read_bytes": alternative.read_bytes,
        "write_bytes": alternative.written_bytes,
        "seconds": round(alternative.seconds, 3),
        "lost": [{"name": name, "reason": reason} for name, reason in alternative.lost],
        "resumes": not alternative.not_resumed,
        "not_resumed": alternative.not_resumed,
        "remarks": alternative.remarks,
        "command": alternative.command,
        "arguments": dict(alternative.arguments),
        "launch": alternative.launch_line,
        "nearest": alternative.nearest,
    }


def plan_data(conversion: ConversionPlan) -> answers.ConversionPlanned:
    """What ``plan --json`` prints."""
    plan, source, targets = conversion.plan, conversion.source, conversion.targets
    described: list[Any] = list(map(_target_data, targets))
    for data, location in zip(described, conversion.target_locations, strict=False):
        data["path"] = location
    full, sample = plan.checked_parameters
    filled, completion = source.history.filled, source.history.completion
    return {
        "plan_id": conversion.plan_id,
        "portion": None if conversion.portion is None else conversion.portion.data(),
        "source": {
            "format": source.format,
            "topology": topology_data(source.job.topology),
            "sharding_strategy": source.job.strategy,
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
        "compared_with_master_weights": {"full": full, "sample": sample},
        "master_weights_made": conversion.master_weights_made,
        "filled_tensors": () if filled is None else filled.tensors,
        "donated_tensors": () if completion is None else completion.tensors,
        "files": [{"path": f.path, "size_bytes": f.size_bytes} for f in plan.target_files],
        "carried": [{"path": c.target_path, "size_bytes": c.size_bytes} for c in plan.carried],
        "not_carried": [entry for data in described for entry in data["not_carried"]],
        "states_not_carried": sorted({state for target in targets for state in target.states_not_carried}),
        "states_dropped": conversion.dropped,
    }


def _target_data(target: PlannedTarget) -> Json:
    return {
        **target.spec.data(),
        "not_carried": [{"path": path, "reason": reason} for path, reason in target.not_carried],
        "states_not_carried": target.states_not_carried,
        "remarks": target.remarks,
        "donated_files": target.donated,
    }


def coverage_data(coverage: Coverage) -> Json:
    """What ``plan --prove --json`` prints under ``coverage``."""
    return {"complete": bool(coverage), **asdict(coverage)}


def explanation_data(explanation: Explanation) -> Json:
    """What ``explain --json`` prints."""
    return {
        "source_path": explanation.source,
        "source": explanation.source_in_words,
        "target": explanation.target_in_words,
        "tensors": [asdict(tensor) for tensor in explanation.tensors],
        "origins": [_origin_data(origin) for origin in explanation.origins],
    }


def _origin_data(origin: Origin) -> Json:
    sides = {
        side: {
            "file": getattr(origin, f"{side}_file"),
            "start": getattr(origin, f"{side}_range")[0],
            "stop": getattr(origin, f"{side}_range")[1],
            "strides": getattr(origin, f"{side}_strides"),
            "dtype": getattr(origin, f"{side}_dtype"),
        }
        for side in ("target", "source")
    }
    return {
        "key": origin.key,
        "state": origin.state,
        "offset": origin.offset,
        "extents": origin.extents,
        **sides,
        "source_state": origin.source_state,
        "rank": origin.rank,
        "how": origin.how,
        "copied": origin.copied,
    }


def conversion_data(report: ConversionReport) -> answers.Converted:
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
        **asdict(report),
        "read_amplification": round(report.read_amplification, 4),
    }


def fingerprint_data(report: FingerprintReport) -> Json:
    """What ``fingerprint --json`` prints."""
    fingerprints = report.fingerprints
    return {
        "path": report.path,
        "algorithm": "crc64nvme",
        "root": fingerprints.root,
        "states": fingerprints.states,
        "read_bytes": report.read_bytes,
        "tensors": [
            {
                "key": tensor.key,
                "state": tensor.state,
                "dtype": tensor.dtype.name,
                "shape": tensor.global_shape,
                "crc64nvme": f"{int(checksum):016x}",
            }
            for tensor, checksum in zip(fingerprints.tensors, fingerprints.checksums, strict=True)
        ],
    }


def diff_data(report: DiffReport) -> Json:
    """What ``diff --json`` prints. Figures that are infinite are ``null``."""
    return {
        "agree": report.agree,
        "tensors": report.tensors,
        "elements": report.elements,
        "read_bytes": report.read_bytes,
        "atol": report.atol,
        "rtol": report.rtol,
        "differing": [
            {
                **asdict(difference),
                "largest": _finite(difference.largest),
                "mean": _finite(difference.mean),
                "values": [_finite(value) for value in difference.values],
                "changed_share": difference.changed_share,
            }
            for difference in report.differing
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
    return {"intact": report.intact, **asdict(report)}


def data_of(result: object) -> Json:
    """What ``--json`` prints of the result of a command."""
    data: Json = _OF[type(result).__name__](result)
    return data


_OF: dict[str, Callable[[Any], Any]] = {
    "CardsPlan": cards_data,
    "ConversionReport": conversion_data,
    "DiffReport": diff_data,
    "Explanation": explanation_data,
    "FingerprintReport": fingerprint_data,
    "Inspection": inspection_data,
    "IntegrityReport": integrity_data,
    "Launch": asdict,
    "Run": asdict,
    "VerifyReport": verify_data,
}
"""Class of a result → its data. The classes are known by name, because most commands need one of them."""
