"""What PaddleFleet's model classes declare of their names, and the rule tables that follow.

``declare`` executes the function with which a class says how a Hugging Face checkpoint becomes its model
(``_gen_aoa_config``), for small configs. Of the library nothing else is needed: the function makes texts. ``tables``
compiles the statements, and the family's PaddleFormers table, which knows the shapes, into PaddleFleet's table. ::

    python3 tests/lab/fleet.py declare path/to/site-packages/paddleformers > tests/golden/fleet/declared.json
    python3 tests/lab/fleet.py tables
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
RULES = REPO / "pipeline" / "model" / "rules"
DECLARED = REPO / "tests" / "golden" / "fleet" / "declared.json"
FORWARD, INVERSE = "_gen_aoa_config", "_gen_inv_aoa_config"
FAMILIES = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "glm4_moe")
"""Those whose class is PaddleFleet's (``is_fleet``) and that have a PaddleFormers table."""
SMALL: Mapping[str, Any] = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 16,
    "attention_bias": False,
    "qkv_bias": True,
    "use_qk_norm": True,
    "tie_word_embeddings": False,
    "using_sonic_moe": False,
    "moe_expert_fusion": False,
    "first_k_dense_replace": 1,
    "mtp_num_layers": 0,
    "num_nextn_predict_layers": 0,
    "num_empty_layers_add_in_head": 0,
}
EXPERTS = {"qwen2_moe": "num_experts", "qwen3_moe": "num_local_experts", "glm4_moe": "n_routed_experts"}
LAYERS = {"glm4_moe": 3}
"""Decoder layers where they are not two: the configs are those of the real checkpoints in ``tests/corpus``."""
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "bias": {"attention_bias": True},
    "tied": {"tie_word_embeddings": True},
    "grouped": {"moe_expert_fusion": True},
    "mtp": {"num_nextn_predict_layers": 1},
    "mtp_grouped": {"num_nextn_predict_layers": 1, "moe_expert_fusion": True},
    "shifted": {"num_empty_layers_add_in_head": 2, "num_nextn_predict_layers": 1},
}
OF_FAMILY = {
    "qwen2": ("plain", "tied"),
    "qwen3": ("plain", "bias", "tied"),
    "qwen2_moe": ("plain",),
    "qwen3_moe": ("plain", "bias", "grouped"),
    "glm4_moe": ("plain", "bias", "grouped", "mtp", "mtp_grouped", "shifted"),
}
"""Family → variants that change something."""


# ------------------------------------------------------------------------------------------------ declarations


class _Config(dict[str, Any]):
    """A config as the functions use it: entries are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class _FleetClass:
    is_fleet = True
    base_model_class = None


class _EagerClass(_FleetClass):
    is_fleet = False


def declare(package: Path) -> dict[str, Any]:
    """Family → variant → what PaddleFleet's class says of the way from a Hugging Face checkpoint to the model.

    And family → what the class that trains without PaddleFleet says of the way there.
    """
    (installed,) = package.parent.glob(f"{package.name}-*.dist-info")
    return {
        "package": installed.name.removesuffix(".dist-info"),
        "families": {
            family: {
                name: _declared(package / "transformers" / family / "modeling.py", family, changes)
                for name, changes in VARIANTS.items()
                if name in OF_FAMILY[family]
            }
            for family in FAMILIES
        },
        "eager": {
            family: _declared(
                package / "transformers" / family / "modeling.py", family, {}, INVERSE, _EagerClass
            )
            for family in FAMILIES
        },
    }


def _declared(
    path: Path, family: str, changes: Mapping[str, Any], name: str = FORWARD, of_class: type = _FleetClass
) -> list[str]:
    entry = EXPERTS.get(family)
    layers = {"num_hidden_layers": LAYERS.get(family, SMALL["num_hidden_layers"])}
    config = _Config({**SMALL, **layers, **({entry: 4} if entry else {}), **changes})
    statements: list[str] = _function(path, name)(of_class, config)["aoa_statements"]
    return statements


def _function(path: Path, name: str) -> Any:
    """The function of the first class that defines it, without its decorator and annotations."""
    for node in ast.parse(path.read_text()).body:
        for function in getattr(node, "body", ()):
            if isinstance(function, ast.FunctionDef) and function.name == name:
                function.decorator_list = []
                function.args.args = [ast.arg(a.arg) for a in function.args.args]
                module = ast.fix_missing_locations(ast.Module(body=[function], type_ignores=[]))
                scope: dict[str, Any] = {}
                exec(compile(module, str(path), "exec"), scope)
                return scope[name]
    raise ValueError(f"{path}: no class has {name}")


# ----------------------------------------------------------------------------------------------------- tables

NOTE = (
    "Compiled from what the model classes of PaddleFormers 1.2.0 declare for PaddleFleet's model (_gen_aoa_config "
    "with is_fleet), and the shapes of the PaddleFormers table; tests/lab/fleet.py. No checkpoint that PaddleFleet "
    "wrote was available. What a hybrid-parallel job calls its parameters is not declared anywhere, so the formats are "
    "limited. "
)
NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
FORMER = {norm: norm.replace("_norm", "_layernorm") for norm in NORMS}
"""What the statements of qwen3 and qwen3_moe call the norms was the name of the attribute until January 2026
(PaddleFleet pull request 482); later ones of qwen3 say the new one, and a statement of a tensor that does not exist
does nothing."""


MTP_SHAPES = {"eh_proj.weight": ["2*hidden_size", "hidden_size"]}
"""Shapes that no row of the PaddleFormers table tells (``transformer/multi_token_prediction.py``); others are norms."""
SOURCE = "paddleformers 1.2.0 transformers/{family}/modeling.py _gen_aoa_config with is_fleet"


def compile_table(family: str, declared: Mapping[str, Any], former: Mapping[str, Any]) -> dict[str, Any]:
    """PaddleFleet's table of a family.

    Parameters
    ----------
    declared
        Variant → what the class declares for it.
    former
        The family's PaddleFormers table.
    """
    known = {
        tuple(row["huggingface"]["keys"]): row
        for row in former["rules"]
        if "huggingface" in row and "stacked" not in row["huggingface"]
    }
    plain = [variant for variant in ("plain", "bias") if variant in declared]
    forms = {k: v for variant in plain for k, v in _forms(declared[variant], family).items()}
    rows = [_row(key, *form, known[form[0]]) for key, form in forms.items()]
    rows += [
        {**row, "key": row["key"].replace(*norm), "former": True}
        for row in rows
        for norm in _former(row["key"])
    ]
    if family in ("qwen3_moe", "glm4_moe"):
        rows += _stacked_rows(declared["grouped"], forms, known, former["experts"])
    order = {key: place for place, key in enumerate(known)}
    rows.sort(key=lambda row: order[tuple(row["huggingface"]["keys"])])
    if family == "glm4_moe":
        rows += _mtp_rows(declared["mtp"], forms)
    (head,) = (row for row in rows if row["key"] == "model.lm_head.weight")
    rows.remove(head)
    twin = {**head, "tied_to": "model.embedding.embed_tokens.weight"}
    last = {
        **twin,
        "key": "model.shared_head.weight",
        "where": {"tie_word_embeddings": True},
        "source": "paddlefleet 0031070 models/gpt/gpt_model.py get_layer_desc_list: the head in the last stage",
    }
    del last["huggingface"]
    sourced = [{"source": SOURCE.format(family=family), **row} for row in (*rows, twin, last)]
    return {
        "family": family,
        "convention": "paddlefleet",
        "model_types": former["model_types"],
        "comment": NOTE + _comment(family),
        "proven": {"files": "declarations", "huggingface": "declarations"},
        **({"experts": former["experts"], "expert_axis": "ep"} if "experts" in former else {}),
        "formats": ["flex", "huggingface"],
        "shifted_by": "num_empty_layers_add_in_head",
        "items": _items(family),
        "rules": sourced,
    }


CLASSES = {
    "embedding": "GPTEmbedding",
    "layer": "TransformerLayer",
    "norm": "WrappedPaddleNormPipe",
    "mtp": "MultiTokenPredictionLayer",
    "head": "GPTLMHead",
}
"""Pipeline items of ``models/gpt/gpt_model.py``, get_layer_desc_list."""


def _items(family: str) -> list[dict[str, Any]]:
    names = ["embedding", "layer", "norm", *(["mtp"] if family == "glm4_moe" else []), "head"]
    more: dict[str, dict[str, Any]] = {
        "layer": {"repeated": True},
        "mtp": {"mtp": True, "continues": "layer", "inner": "transformer_layer"},
    }
    return [{"name": name, "layer_class": CLASSES[name], **more.get(name, {})} for name in names]


def _comment(family: str) -> str:
    said = []
    if family in ("qwen3", "qwen3_moe"):
        said.append("q_layernorm and k_layernorm are what versions before 2026 call q_norm and k_norm. ")
    if family in ("qwen3_moe", "glm4_moe"):
        said.append(
            "Grouped experts (moe_expert_fusion, using_sonic_moe) are written with two dims, as PaddleFormers 1.2 with "
            "PaddleFleet 0.3 saves and loads them; with three dims they are read. "
        )
    if family in ("qwen2_moe", "qwen3_moe"):
        said.append("No rows for dense layers (mlp_only_layers), which the class does not declare. ")
    return "".join(said).strip()


_Form = tuple[tuple[str, ...], bool]
"""Keys in a Hugging Face checkpoint, and whether dims change places."""


def _forms(statements: Sequence[str], family: str, mtp: bool = False) -> dict[str, _Form]:
    """Key in the model → what it is there, of the decoder layers or of those of multi-token prediction."""
    forms = {}
    for names, target in map(_parsed, statements):
        layer = re.search(r"layers\.(\d+)\.", names[0])
        behind = layer is not None and int(layer[1]) >= LAYERS.get(family, SMALL["num_hidden_layers"])
        stacks = len(names) > 3
        if behind == mtp and not stacks:
            keys = tuple(_numbers(name.removesuffix("^T")) for name in names)
            forms[_numbers(target)] = keys, names[0].endswith("^T")
    return {key.replace(*norm): form for key, form in forms.items() for norm in (_now(key),)}


def _parsed(statement: str) -> tuple[list[str], str]:
    left, _, right = statement.partition(" -> ")
    return [name.strip() for name in left.split(",")], right.partition(",")[0].strip()


def _numbers(name: str) -> str:
    """A key with placeholders for its numbers, as a table has it."""
    name = re.sub(r"layers\.(\$LAYER_ID|\d+)\.", "layers.{layer}.", name)
    return re.sub(r"experts\.(\$EXPERT_ID|\d+)\.", "experts.{expert}.", name)


def _now(key: str) -> tuple[str, str]:
    """What to replace in a key so that it is as later versions spell it."""
    return next(((before, now) for now, before in FORMER.items() if before in key), ("", ""))


def _former(key: str) -> list[tuple[str, str]]:
    return [(now, before) for now, before in FORMER.items() if now in key]


def _row(key: str, keys: tuple[str, ...], transposed: bool, known: Mapping[str, Any]) -> dict[str, Any]:
    """A row, with what a row of the PaddleFormers table says of the same tensors."""
    form = known["huggingface"]
    turned = transposed != form.get("transposed", False)
    split = None if turned else known.get("split")
    row = {
        "key": key,
        "item": known["item"],
        "name_class": "",
        **({} if split is None else {"split": split}),
        **({"parts": known["parts"]} if known.get("parts", 1) > 1 else {}),
        "shape": known["shape"][::-1] if turned else known["shape"],
        "huggingface": {**form, "keys": list(keys), "transposed": transposed},
    }
    if not transposed:
        del row["huggingface"]["transposed"]
    return row


def _stacked_rows(
    statements: Sequence[str], forms: Mapping[str, _Form], known: Mapping[Any, Any], experts: str
) -> list[dict[str, Any]]:
    """The rows of what holds all experts of a layer: their tensors one after the other."""
    rows = {}
    for names, target in map(_parsed, statements):
        if len(names) > 3:
            ((keys, transposed),) = {forms[_numbers(name)] for name in names}
            row = _row(_numbers(target), keys, transposed, known[keys])
            row["shape"] = [f"{experts}*{row['shape'][0]}", row["shape"][1]]
            row["huggingface"]["stacked"] = experts
            rows[row["key"]] = {k: v for k, v in row.items() if k not in ("split", "parts")}
    return list(rows.values())


def _mtp_rows(statements: Sequence[str], decoder: Mapping[str, _Form]) -> list[dict[str, Any]]:
    """The rows of what a layer of multi-token prediction has beside a decoder layer, which is declared as any other."""
    rows = []
    for key, (keys, transposed) in _forms(statements, "glm4_moe", mtp=True).items():
        if ".transformer_layer." in key:
            if decoder[key.replace(".transformer_layer.", ".")] != (keys, transposed):
                raise ValueError(f"{key} is not what a decoder layer has")
            continue
        shape = MTP_SHAPES.get(key.partition("{layer}.")[2], ["hidden_size"])
        form = {"keys": list(keys), **({"transposed": True} if transposed else {})}
        split = {"split": 1} if len(shape) > 1 else {}
        rows.append(
            {"key": key, "item": "mtp", "name_class": "", **split, "shape": shape, "huggingface": form}
        )
    return rows


def tables() -> dict[Path, str]:
    """Path → text of every table that follows from what is declared."""
    from tests.rule_tables import shortened, whole

    made = {}
    for family, declared in json.loads(DECLARED.read_text())["families"].items():
        former = whole(f"{family}.paddleformers")
        made[RULES / f"{family}.paddlefleet.json"] = shortened(
            f"{family}.paddlefleet", compile_table(family, declared, former)
        )
    return made


if __name__ == "__main__":
    if sys.argv[1] == "declare":
        sys.stdout.write(json.dumps(declare(Path(sys.argv[2])), indent=1) + "\n")
    else:
        for path, text in tables().items():
            path.write_text(text)
