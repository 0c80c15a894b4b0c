"""Largest input of every linear layer over calibration text, with one decoder layer in memory at a time.

The built-in text ``sglang/data/calibration.txt`` was written for this project and has its licence.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm
from transformers import AutoModel, AutoTokenizer, PreTrainedConfig

from sglang.srt.errors import ArgumentError, CheckpointError
from sglang.srt.model_loader.checkpoint_reader import CheckpointReader

_SEQUENCE_LENGTH = 512
_EMBEDDING = "model.embed_tokens.weight"


def read_calibration_text(file: str | None) -> str:
    """The text in ``file`` (UTF-8), or the built-in one for None; ArgumentError where it can't be used."""
    if file is None:
        return resources.files("sglang").joinpath("data/calibration.txt").read_text(encoding="utf-8")
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"--calibration-text {file}: can't be read as UTF-8 text: {error}") from error
    if not text.strip():
        raise ArgumentError(f"--calibration-text {file}: the file is empty")
    return text


def tokenize_calibration_text(model_path: Path, text: str, context_len: int) -> torch.Tensor:
    """Cut ``text`` into sequences of 512 tokens (or ``context_len``) with the model's own tokenizer.

    Each sequence starts with the special tokens that the tokenizer puts in front of a text; the last one ends with
    the text and may overlap the one before. Where the tokenizer has a chat template one more sequence is the opening
    of the text as a user's message, because the first tokens of a chat often have by far the largest activations.

    Returns:
        int64 [sequences, tokens]; shorter sequences only if the whole text is shorter.

    Raises:
        CheckpointError: the folder has no usable tokenizer.
    """
    chat: list[int] = []
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path)
        front = list(tokenizer("")["input_ids"])
        body = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        if tokenizer.chat_template:
            message = [{"role": "user", "content": text}]
            rendered = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
            chat = list(tokenizer(rendered, add_special_tokens=False, verbose=False)["input_ids"])
    except Exception as error:  # whatever a checkpoint's tokenizer or template raises
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(f"{model_path}: calibration needs the tokenizer; using it failed: {reason[0]}") from error
    if not body:
        raise CheckpointError(f"{model_path}: the tokenizer makes no tokens of the calibration text")
    room = min(max(min(_SEQUENCE_LENGTH, context_len) - len(front), 1), len(body))
    starts = [*range(0, len(body) - room, room), len(body) - room]
    sequences = [front + body[start : start + room] for start in starts]
    length = len(sequences[0])
    if len(chat) >= length:
        sequences.append(chat[:length])
    return torch.tensor(sequences, dtype=torch.int64)


def calibrate_input_amax(
    config: PreTrainedConfig,
    reader: CheckpointReader,
    token_ids: torch.Tensor,
    device: torch.device,
    batch_size: int = 4,
    show_progress: bool = True,
) -> dict[str, float]:
    """Run the model over ``token_ids`` and record the largest magnitude that enters each linear layer.

    The transformers model stays without weights; each decoder layer gets its own when the forward pass reaches it,
    serves all sequences, and loses them again. The head is not run.

    Args:
        config: transformers' configuration of the model.
        reader: its tensors.
        token_ids: int64 [sequences, tokens].
        device: where the layers run, in the dtype of the embedding.
        batch_size: sequences that pass a layer together.
        show_progress: draw a progress bar on stderr.

    Returns:
        {module name: amax} for every linear layer of the decoder layers.

    Raises:
        CheckpointError: a tensor is missing or has another shape than the configuration says, a token is not in the
            vocabulary, or activations are not finite.
    """
    hidden = _embed(reader, token_ids).to(device)
    with torch.device("meta"):
        model = AutoModel.from_config(config, dtype=hidden.dtype).eval()
    model.rotary_emb = type(model.rotary_emb)(config=config).to(device)
    model.norm = nn.Identity()
    amax: dict[str, float] = {}
    with tqdm(total=len(model.layers), desc="Calibrating", unit="layer", disable=not show_progress) as progress:
        for index, layer in enumerate(model.layers):
            prefix = f"model.layers.{index}."
            model.layers[index] = _StreamedLayer(layer, prefix, reader, device, batch_size, amax, progress)
        with torch.inference_mode():
            model(inputs_embeds=hidden, use_cache=False)
    return amax


def _embed(reader: CheckpointReader, token_ids: torch.Tensor) -> torch.Tensor:
    if _EMBEDDING not in reader.tensors:
        raise CheckpointError(f"tensor {_EMBEDDING} is missing from the weights")
    _, table = next(reader.read([_EMBEDDING]))
    if (largest := int(token_ids.max())) >= len(table):
        raise CheckpointError(
            f"the tokenizer makes token {largest} of the calibration text, but {_EMBEDDING} has {len(table)} rows; "
            "is it another model's tokenizer?"
        )
    return table[token_ids]


class _StreamedLayer(nn.Module):
    """A decoder layer that holds weights only while all sequences pass through it."""

    def __init__(
        self,
        layer: nn.Module,
        prefix: str,
        reader: CheckpointReader,
        device: torch.device,
        batch_size: int,
        amax: dict[str, float],
        progress: Any,
    ) -> None:
        super().__init__()
        self.layer, self.prefix, self.reader, self.device = layer, prefix, reader, device
        self.batch_size, self.amax, self.progress = batch_size, amax, progress
        for name, module in layer.named_modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(self._recorder(prefix + name))

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        self._load(hidden_states.dtype)
        if attention_mask is not None:
            attention_mask = attention_mask[:1]  # sequences have no padding, so all have the same mask
        for start in range(0, len(hidden_states), self.batch_size):
            batch = slice(start, start + self.batch_size)
            # In place: nothing else needs the layer's input.
            hidden_states[batch] = self.layer(hidden_states[batch], attention_mask=attention_mask, **kwargs)
        self.layer.to("meta")
        self.progress.update()
        return hidden_states

    def _load(self, dtype: torch.dtype) -> None:
        wanted = {self.prefix + name: parameter.shape for name, parameter in self.layer.named_parameters()}
        missing = [name for name in wanted if name not in self.reader.tensors]
        if missing:
            raise CheckpointError(f"tensor {missing[0]} is missing from the weights")
        state = {}
        for name, tensor in self.reader.read(wanted):
            if tensor.shape != wanted[name]:
                shape = list(tensor.shape)
                raise CheckpointError(f"tensor {name} has shape {shape}, config.json asks for {list(wanted[name])}")
            state[name.removeprefix(self.prefix)] = tensor.to(self.device, dtype)
        self.layer.load_state_dict(state, assign=True)

    def _recorder(self, name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        def hook(_module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            low, high = torch.aminmax(inputs[0])
            largest = max(-float(low), float(high))
            if not isfinite(largest):
                raise CheckpointError(f"the input of {name} is NaN or infinite during calibration; is the model whole?")
            self.amax[name] = max(self.amax.get(name, 0.0), largest)

        return hook
