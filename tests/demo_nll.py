"""By hand: the mean NLL of a SmolLM2 checkpoint on the anchor tokens, by transformers on dequantised weights, fp32.

    python tests/demo_nll.py FOLDER [FOLDER ...]

A folder is the bf16 checkpoint or the NVFP4 one, whose weights are dequantised by the numpy reference of the fixtures
(activations are left alone). Exit status 1 if a number differs from its anchor by more than 0.01 %.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

FIXTURES = Path(__file__).parent / "fixtures"
sys.path.insert(0, str(FIXTURES / "scripts"))
from reference_model import dequant, unpack  # noqa: E402


def dequantised(folder: Path) -> dict[str, torch.Tensor]:
    """fp32 weights by name; keys that only describe the quantisation are gone."""
    stored = {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}
    weights = {}
    for name, tensor in stored.items():
        if name.endswith((".weight_scale", ".weight_scale_2", ".input_scale")):
            continue
        if tensor.dtype == torch.uint8:
            scale = stored[f"{name}_scale"].view(torch.uint8).numpy()
            tensor = torch.from_numpy(dequant(unpack(tensor.numpy()), scale, stored[f"{name}_scale_2"].item()))
        weights[name] = tensor.float()
    return weights


def mean_nll(folder: Path, token_ids: list[int]) -> float:
    config = AutoConfig.from_pretrained(folder, dtype=torch.float32)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = LlamaForCausalLM(config).eval()
    missing, unexpected = model.load_state_dict(dequantised(folder), strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    ids = torch.tensor([token_ids])
    with torch.inference_mode():
        logits = model(ids, use_cache=False).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits, ids[0, 1:]).item()


def main() -> int:
    torch.set_num_threads(2)
    anchors = json.loads((FIXTURES / "smollm2_anchors.json").read_text())
    ids = anchors["token_ids"]
    failed = False
    for folder in map(Path, sys.argv[1:]):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        same_ids = tokenizer(tokenizer.decode(ids)).input_ids == ids
        kind = "w4a16" if "quantization_config" in json.loads((folder / "config.json").read_text()) else "bf16"
        nll, expected = mean_nll(folder, ids), anchors["mean_nll_first_1024"][kind]
        failed |= not same_ids or abs(nll - expected) > 1e-4 * expected
        print(f"{folder}: {kind} mean NLL {nll:.6f}, anchor {expected:.6f}; tokens re-encode alike: {same_ids}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
