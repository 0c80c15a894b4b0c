"""Groups I and J: reloading, output heads, tied weights, LoRA flags. (I3 is with the shapes.)"""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import Checkpoint, Shape, base, quantize_head
from harness import assert_layers_match, forward, load, logits_of
from oracle import Oracle, array, relative_error

from sglang.srt.errors import ArgumentError
from sglang.srt.server_args import prepare_server_args

Written = Callable[..., Path]


def tied() -> Checkpoint:
    checkpoint = base(tie_word_embeddings=True)
    del checkpoint.tensors["lm_head.weight"]
    return checkpoint


def test_i6_an_update_that_lacks_a_layer_fails(written: Written) -> None:
    old, other = base(), base()
    for name in other.names("*.weight_scale_2"):
        other.tensors[name] = other.tensors[name] * 1.5
    lacking = base()
    lacking.drop("model.layers.1.*")
    runner = load(written(old))
    before = forward(runner)
    done, message = runner.update_weights_from_disk(str(written(lacking)), "auto")
    assert not done and "lacks model.layers.1." in message
    assert torch.equal(forward(runner), before)
    done, message = runner.update_weights_from_disk(str(written(other)), "auto")
    assert done, message
    assert torch.equal(forward(runner), logits_of(written(other))) and not torch.equal(forward(runner), before)


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("vocab", [320, 321])
def test_j1_quantised_head(vocab: int, tp_size: int, written: Written) -> None:
    checkpoint = base(Shape(vocab=vocab))
    quantize_head(checkpoint)
    checkpoint.section["exclude_modules"] = []
    assert_layers_match(written(checkpoint), tp_size=tp_size)


def check_tied(folder: Path) -> torch.Tensor:
    """Logits are those of the embedding."""
    runner = load(folder, dtype="float32")
    normed = []
    runner.model.model.norm.register_forward_hook(lambda module, args, output: normed.append(output[0].clone()))
    logits = forward(runner)
    embedding = Oracle(folder / "model.safetensors").weight("model.embed_tokens")
    assert relative_error(logits, array(normed[0][-1:]).astype("float64") @ embedding.T) < 1e-5
    return logits


def test_j2_tied_head(written: Written, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = tied()
    expected = check_tied(written(checkpoint))
    assert not [record for record in caplog.records if "lm_head" in record.getMessage()]
    checkpoint.tensors["lm_head.weight"] = torch.zeros(1)
    quantize_head(checkpoint)
    for excluded in (["lm_head"], []):
        checkpoint.section["exclude_modules"] = excluded
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert torch.equal(check_tied(written(checkpoint)), expected)
        assert "lm_head.weight_scale" in caplog.text and "not used" in caplog.text


def test_j3_the_head_in_a_mixed_table(written: Written) -> None:
    checkpoint = base()
    quantize_head(checkpoint)
    table = {name: {"quant_algo": "NVFP4"} for name in [*checkpoint.layers("*"), "lm_head"]}
    checkpoint.hf_quant_config = {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": table}}
    assert_layers_match(written(checkpoint))


def test_j4_a_stray_head_scale_of_a_tied_model(written: Written, caplog: pytest.LogCaptureFixture) -> None:
    expected = logits_of(written(tied()), dtype="float32")
    checkpoint = tied()
    checkpoint.tensors["lm_head.weight_scale_2"] = torch.tensor(7.0)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(check_tied(written(checkpoint)), expected)
    assert "lm_head.weight_scale_2" in caplog.text


@pytest.mark.parametrize("flag", ["--lora-paths", "--enable-lora"])
def test_j6_lora_is_refused(flag: str) -> None:
    with pytest.raises(ArgumentError, match=f"{flag} is known from SGLang but not supported"):
        prepare_server_args(["--model-path", "x", flag, "y"])
