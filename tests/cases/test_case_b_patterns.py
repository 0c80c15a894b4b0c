"""Group B: exclusion lists."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import Checkpoint, Shape, base, copy_of
from harness import assert_layers_match, assert_refused, linear_layers, load, logits_of

from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

Written = Callable[..., Path]
DOWN = "model.layers.0.mlp.down_proj"


def excluding(*patterns: str, plain: str = "") -> Checkpoint:
    """The base with this exclusion list, and the layers matching ``plain`` stored as bf16."""
    checkpoint = base()
    checkpoint.section["exclude_modules"] = list(patterns)
    if plain:
        checkpoint.make_plain(plain)
    return checkpoint


def renamed(checkpoint: Checkpoint, rename: Callable[[str], str]) -> Checkpoint:
    """The same checkpoint with other tensor names."""
    other = copy_of(checkpoint)
    other.tensors = {rename(name): tensor for name, tensor in checkpoint.tensors.items()}
    return other


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name,
        lambda name: "language_model." + name,
        lambda name: name.replace("model.", "model.language_model.", 1),
    ],
    ids=["plain", "language_model.model", "model.language_model"],
)
@pytest.mark.parametrize("renamed_list", [False, True])
def test_b1_patterns_when_names_differ_by_a_prefix(
    rename: Callable[[str], str], renamed_list: bool, written: Written
) -> None:
    plain = excluding("lm_head", "model.layers.1.mlp*", plain="model.layers.1.mlp*")
    checkpoint = renamed(plain, rename)
    if renamed_list:
        checkpoint.section["exclude_modules"] = ["lm_head", rename("model.layers.1.mlp*")]
    assert_layers_match(written(checkpoint), source=written(plain))


def test_b2_a_pattern_that_matches_nothing(written: Written) -> None:
    pattern = "model.layers.language_model.layers.0.mlp.down_proj"
    assert_refused(written(excluding("lm_head", pattern, plain=DOWN)), pattern, "matches no layer")
    # ... whether or not anything else is wrong
    assert_refused(written(excluding("lm_head", pattern)), pattern, "matches no layer")


def test_b3_every_part_of_a_fused_layer_by_its_own_name(written: Written) -> None:
    parts = [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]
    folder = written(excluding("lm_head", *parts, plain="model.layers.0.self_attn.[qkv]_proj"))
    assert_layers_match(folder)
    layers = linear_layers(load(folder))
    assert isinstance(layers["model.layers.0.self_attn.qkv_proj"].quant_method, UnquantizedLinearMethod)


@pytest.mark.parametrize("pattern", ["lm_head", "*lm_head*"])
def test_b6_the_head_has_a_name_that_patterns_match(pattern: str, written: Written) -> None:
    folder = written(excluding(pattern))
    assert_layers_match(folder)
    assert isinstance(linear_layers(load(folder))["lm_head"].quant_method, UnquantizedLinearMethod)
    assert_refused(written(excluding()), "lm_head.weight", "torch.uint8", "torch.bfloat16")


@pytest.mark.parametrize(
    "patterns",
    [
        ["model.layers.?.mlp.down_proj"],
        ["*down_proj"],
        ["re:.*down_proj$"],
        ["model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"],
        ["model.layers.[01].mlp.down_proj"],
    ],
    ids=["question-mark", "star", "regex", "names", "set"],
)
def test_b7_globs_expressions_and_names(patterns: list[str], written: Written) -> None:
    assert_layers_match(written(excluding("lm_head", *patterns, plain="*down_proj")))


@pytest.mark.parametrize("pattern", ["model.layers.0.mlp.down.proj", "model_layers.0.mlp.down_proj", ".*down_proj$"])
def test_b7_neither_a_name_nor_a_glob_is_an_expression(pattern: str, written: Written) -> None:
    assert_refused(written(excluding("lm_head", pattern)), repr(pattern), "matches no layer")


@pytest.mark.parametrize("word", ["mlp", "down_proj", "model.layers.1.mlp.down"])
def test_b9_a_bare_word_is_no_substring(word: str, written: Written) -> None:
    assert_refused(written(excluding("lm_head", word, plain="*mlp*")), repr(word), "matches no layer")


def test_b9_a_name_covers_what_is_below_it(written: Written) -> None:
    assert_layers_match(written(excluding("lm_head", "model.layers.1.mlp", plain="model.layers.1.mlp.*")))


def test_b11_588_columns_are_refused(written: Written) -> None:
    checkpoint = base(Shape(intermediate=592, layers=1))
    checkpoint.config["intermediate_size"] = 588
    for part in ("gate_proj", "up_proj"):
        for tensor in ("weight", "weight_scale"):
            key = f"model.layers.0.mlp.{part}.{tensor}"
            checkpoint.tensors[key] = checkpoint.tensors[key][:588]
    checkpoint.tensors[DOWN + ".weight"] = checkpoint.tensors[DOWN + ".weight"][:, :294]
    assert checkpoint.tensors[DOWN + ".weight_scale"].shape == (256, 37)
    assert_refused(written(checkpoint), DOWN, "multiple of 16", "588")


@pytest.mark.parametrize("backend", ["torch", "cpu", "cudnn", "trtllm"])
def test_b11_4304_rows_are_padded(backend: str, written: Written, blackwell: Callable[[str], object]) -> None:
    blackwell(backend)
    shape = Shape(hidden=64, intermediate=4304, heads=1, kv_heads=1, layers=1)
    assert_layers_match(written(base(shape)), dtypes=["bfloat16"])


@pytest.mark.parametrize("tp_size", [1, 2])
def test_b12_some_parts_of_a_fused_layer_are_excluded(tp_size: int, written: Written) -> None:
    checkpoint = excluding("lm_head", "*k_proj", "model.layers.1.mlp.up_proj", plain="*k_proj")
    checkpoint.make_plain("model.layers.1.mlp.up_proj")
    assert_layers_match(written(checkpoint), tp_size=tp_size)


def test_b13_an_absent_part(written: Written) -> None:
    checkpoint = base()
    checkpoint.drop("model.layers.0.self_attn.v_proj.*")
    assert_refused(written(checkpoint), "lacks model.layers.0.self_attn.v_proj.weight")


@pytest.mark.parametrize("key", ["exclude_modules", "ignore", "ignored_layers", "modules_to_not_convert"])
@pytest.mark.parametrize("flat", [False, True], ids=["hf_quant_config", "config"])
def test_b14_every_name_of_the_list_in_every_file(key: str, flat: bool, written: Written) -> None:
    usual = excluding("lm_head", "*.1.mlp.*", plain="*.1.mlp.*")
    checkpoint = copy_of(usual)
    patterns = checkpoint.section.pop("exclude_modules")
    checkpoint.section[key] = patterns
    if flat:
        checkpoint.move_config(quant_method="modelopt", quant_algo="NVFP4", **{key: patterns})
    assert torch.equal(logits_of(written(checkpoint)), assert_layers_match(written(usual), dtypes=["bfloat16"]))
