"""Whatever a program says wrong is named with its file, its line and the tensor."""

import pickle

import numpy as np
import pytest

from paddle_reshard.pipeline.changes.aoa.apply import apply_aoa
from paddle_reshard.pipeline.changes.aoa.language import parse_aoa
from paddle_reshard.pipeline.core.errors import PlanError, ReshardError, UsageError
from tests.aoa.arrays import stored, trained

SHAPES = {
    "a": ((4, 6), "bfloat16"),
    "b": ((4, 2), "bfloat16"),
    "f": ((4, 2), "float32"),
    "v": ((6,), "bfloat16"),
    "l.0.w": ((4, 6), "bfloat16"),
    "l.1.w": ((4, 6), "bfloat16"),
}
HEADS = "num_heads=4, num_key_value_groups=2"

SYNTAX = {
    "a b": "expected '->', found 'b' (column 3)",
    "-> b": "expected the name of a tensor, found '->'",
    "a -> ": "expected the name of a tensor, found 'the end'",
    "a -> b axis=0": "expected ',' or the end, found 'axis'",
    "a-b -> c": "unexpected character '-' (column 2)",
    "a/b -> c": "unexpected character '/'",
    "a -> b^T": "expected a name without ^T, found 'b^T'",
    "_^T -> b": "expected a name without ^T, found '_^T'",
    "a^Tb -> c": "optionally followed by ^T, found 'a^Tb'",
    "a -> b, axis=x": "expected a number as axis, found 'x'",
    "a -> b, c, axis": "expected 'axis=NUMBER'",
    "a -> b, axis=": "expected a number as axis, found 'the end'",
    "a -> b, shape=1": "found 'shape'",
    "a -> b, axis=0, dtype='float32'": "expected a single attribute",
    "a -> b, axis=0, axis=1": "axis is given twice",
    "a -> b, src_dtype='float32'": "src_dtype requires a further attribute",
    "a -> b, num_heads=4": "num_heads requires a further attribute",
    "a -> b, dtype='int8'": "expected one of float16, float32, bfloat16, found 'int8'",
    "a -> b, permute='1,0'": "expected permute as",
    "a -> b, permute='[1 0]'": "expected permute as",
    "a -> b, permute='[0,2]'": "expected a permutation of the dims 0 to 1",
    "a -> b, permute='[0,0]'": "expected a permutation of the dims 0 to 1",
    "a,b -> c": "expected 'axis=NUMBER'",
    "a,b -> c,d, axis=0": "expected a single name on one side, found 2 -> 2",
    "a,b -> c, dtype='float32'": "expected 'axis=NUMBER'",
    "a, _ -> c, axis=0": "expected '_' alone on one side",
    "_ -> _": "expected '_' alone on one side",
    "a -> _, axis=0": "expected '_' alone on one side, and no attribute",
    "a[2:2] -> c, axis=0": "expected a range of 1 to",
    "a[0:999999999] -> c, axis=0": "expected a range of 1 to",
    "a^T[0:2] -> c, axis=0": "expected a name without ^T before '['",
    "a[0:] -> c": "expected the end of a range, found ']'",
    "a.$LAYER -> c": "expected $LAYER_ID, $LAYER_ID_OFFSET or $EXPERT_ID",
    "l.$LAYER_ID.w -> c": "expected the same $LAYER_ID",
    "l.$LAYER_ID.w -> l.$LAYER_ID_OFFSET.w": "expected the same $LAYER_ID",
    "a.*.* -> c": "expected at most one '*' in a name",
    "a -> b, c, d, e, fused_ffn": "expected 1 -> 1 or 1 -> 2 or 2 -> 1 names with fused_ffn, found 1 -> 4",
    f"a -> b, fused_qkv, {HEADS}": "expected 1 -> 3 or 3 -> 1 names with fused_qkv",
    "a -> b, c, d, fused_qkv": "expected fused_qkv, num_heads, num_key_value_groups and optionally axis",
    f"a -> b, fused_ffn, {HEADS}": "expected fused_ffn and optionally axis",
    "a -> b, fused_ffn, fused_qkv": "expected fused_ffn and optionally axis",
    "a -> b, c, d, fused_qkv, num_heads=3, num_key_value_groups=2": "expected num_heads in 2 equal groups, found 3",
    "a -> b, c, d, fused_qkv, num_heads=0, num_key_value_groups=0": "equal groups, found 0",
}


@pytest.mark.parametrize("statement", SYNTAX)
def test_what_cannot_be_read(statement: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_aoa(f"# rules\na -> a\n\n{statement}", "rules.aoa")
    assert str(caught.value).startswith("rules.aoa, line 4: ")
    assert SYNTAX[statement] in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"aoa_statements": ["a -> b", "a b"]}', "rules.json, statement 2: expected '->'"),
        ('{"aoa_statements": ["a -> b", 3]}', "rules.json, statement 2: 3 is not a string"),
        ('{"aoa_statements": "a -> b"}', "'aoa_statements' is unknown or of the wrong type"),
        ('{"aoa_statements": [], "reverse": true}', "'reverse' is unknown"),
        ('{"aoa_statements": [], "aoa_config_reverse": 1}', "'aoa_config_reverse' is unknown or of the wrong type"),
        ("{}", "'aoa_statements' is missing"),
        ('{"aoa_statements": [], "aoa_statements": []}', "the key 'aoa_statements' stands twice"),
        ('{"aoa_statements": ', "not valid JSON"),
        ("{" * 100000, "not valid JSON"),
    ],
)  # fmt: skip
def test_json_that_is_no_configuration(text: str, told: str) -> None:
    with pytest.raises(UsageError, match=r"rules\.json") as caught:
        parse_aoa(text, "rules.json")
    assert told in str(caught.value)


IMPOSSIBLE = {
    "x -> y": "line 1: x is neither in the source nor made by an earlier statement",
    "a -> _\na -> y": "line 2: a is dropped in rules.aoa, line 1",
    "a -> y\na -> _": "line 2: cannot drop a, because rules.aoa, line 1 uses it",
    "a -> y\nb -> y": "line 2: y is made twice, first in rules.aoa, line 1, whose result is not used",
    "a -> b": "line 1: b of the source would be lost, because no statement uses it",
    "a -> x, x, axis=0": "line 1: x is made twice",
    "_ -> a": "line 1: a would be lost: a file holds its values",
    "_ -> y\ny -> x": "line 2: y is in no file, as rules.aoa, line 1 says",
    "a -> a\na -> _": "line 2: cannot drop a, because rules.aoa, line 1 uses it",
    "a -> _\nb -> _\nf -> _\nv -> _\nl.0.w -> _\nl.1.w -> _": "its statements leave no tensor",
    "a -> x[0:4], axis=1": "axis 1 of a tensor of shape (4, 6) cannot be divided into 4 equal parts",
    "a -> x[0:2], axis=2": "axis 2 does not exist in a tensor of shape (4, 6)",
    "a, b -> c, axis=0": "tensors of shapes (4, 6) and (4, 2) cannot be concatenated along axis 0",
    "a, v -> c, axis=0": "tensors of shapes (4, 6) and (6,) cannot be concatenated",
    "b, f -> c, axis=0": "tensors of dtypes bfloat16 and float32 cannot be concatenated without a cast",
    "v -> c, permute='[1,0]'": "permute has 2 dims, but the tensor has shape (6,)",
    "a -> c, src_dtype='float32', dst_dtype='float16'": "src_dtype is float32, but the tensor is bfloat16",
    "a, b -> c, fused_ffn": "units of equal size, found [6, 2]",
    "v -> c, fused_ffn": "axis 1 does not exist",
    "a -> q,k,t, fused_qkv, num_heads=999999996, num_key_value_groups=2": "divided into 1000000000 equal parts",
    f"a,l.0.w,l.1.w -> c, fused_qkv, {HEADS}": "a tensor of shape (4, 6) cannot be divided into 4 equal parts",
    "a,l.0.w,l.1.w -> c, fused_qkv, num_heads=6, num_key_value_groups=2": "units of equal size, found [1, 3, 3]",
    "l.$LAYER_ID_OFFSET.w -> m.$LAYER_ID_OFFSET.w": "layer 0 of l.$LAYER_ID_OFFSET.w would become layer -1",
    "l.$LAYER_ID.w -> m.$LAYER_ID.w\nm.$LAYER_ID.w^T -> n.$LAYER_ID.w": "line 2: placeholders take numbers",
    "l.*.v -> c, axis=0": "l.*.v matches no tensor",
    "a -> x.*, axis=0": "cannot expand '*' on the target's side",
    "l.*.w -> c": "expected 'axis=NUMBER'",
}


@pytest.mark.parametrize("text", IMPOSSIBLE)
def test_what_cannot_be_done(text: str) -> None:
    catalog, _ = stored(trained(SHAPES, np.random.default_rng(0), states=False), np.random.default_rng(0))
    with pytest.raises(ReshardError) as caught:
        apply_aoa(catalog, parse_aoa(text, "rules.aoa"))
    assert type(caught.value) in (UsageError, PlanError)
    assert str(caught.value).startswith("rules.aoa")
    assert IMPOSSIBLE[text] in str(caught.value)


def test_a_cast_without_its_source_dtype() -> None:
    catalog, _ = stored(trained(SHAPES, np.random.default_rng(0), states=False), np.random.default_rng(0))
    with pytest.raises(UsageError, match=r"rules.aoa, line 1: dtype= cannot be reversed"):
        apply_aoa(catalog, parse_aoa("c -> a, dtype='float32'", "rules.aoa").reversed())
