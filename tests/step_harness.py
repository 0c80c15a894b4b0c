"""Drives a ModelRunner without a scheduler, and makes small random models with transformers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import SINGLE, TensorParallelGroup
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode, LogitsProcessorOutput
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs


def make_model(config: PretrainedConfig, folder: Path) -> PreTrainedModel:
    """A transformers model in fp32 with weights that let every part of it matter; saved to ``folder``."""
    generator = torch.Generator().manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.dim() == 2:
                param.normal_(std=0.25 if "embed" in name else param.shape[1] ** -0.5, generator=generator)
            elif name.endswith("bias"):
                param.normal_(std=0.5, generator=generator)
            else:
                param.uniform_(0.5, 1.5, generator=generator)
    model.save_pretrained(folder)
    return model


def make_runner(
    folder: Path, tp: TensorParallelGroup = SINGLE, *, context_len: int = 128, **args: object
) -> ModelRunner:
    given = {"device": "cpu", "dtype": "float32", "max_total_tokens": 512, "max_running_requests": 8, **args}
    server_args = ServerArgs.from_kwargs(model_path=str(folder), random_seed=0, **given)
    config = ModelConfig.from_server_args(server_args)
    # Whatever the configuration's policy on lengths is.
    return ModelRunner(server_args, replace(config, context_len=context_len), tp)


class Stepper:
    """Requests in rows of the pool, with slots in random pages."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.lengths = [0] * runner.max_running_requests
        self.pages = list(range(1, runner.max_total_num_tokens // runner.page_size + 1))
        random.Random(3).shuffle(self.pages)

    def step(
        self,
        new_tokens: dict[int, Sequence[int]],
        params: Sequence[SamplingParams] | None = None,
        logprob_starts: list[int] | None = None,
        logprob_targets: list[list[int]] | None = None,
        tops: list[int] | None = None,
    ) -> tuple[LogitsProcessorOutput, ForwardBatch]:
        """Append ``new_tokens`` to the requests in these rows; one each is a decode step."""
        runner, page, device = self.runner, self.runner.page_size, self.runner.device
        table = runner.req_to_token_pool.req_to_token
        positions: list[int] = []
        slots: list[int] = []
        for row, tokens in new_tokens.items():
            for position in range(self.lengths[row], self.lengths[row] + len(tokens)):
                if position % page == 0:
                    slots.append(self.pages.pop() * page)
                else:
                    slots.append(int(table[row, position - 1]) + 1)
                table[row, position] = slots[-1]
                positions.append(position)
            self.lengths[row] += len(tokens)
        seq_lens = [self.lengths[row] for row in new_tokens]
        decode = logprob_targets is None and all(len(tokens) == 1 for tokens in new_tokens.values())
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE if decode else ForwardMode.EXTEND,
            input_ids=torch.tensor([token for tokens in new_tokens.values() for token in tokens], device=device),
            positions=torch.tensor(positions, device=device),
            req_pool_indices=torch.tensor(list(new_tokens), device=device),
            seq_lens=torch.tensor(seq_lens, device=device),
            seq_lens_list=seq_lens,
            out_cache_loc=torch.tensor(slots, device=device),
            extend_seq_lens=[len(tokens) for tokens in new_tokens.values()],
            sampling_info=SamplingBatchInfo.from_params(
                params or [SamplingParams(temperature=0.0)] * len(new_tokens), runner.model_config.vocab_size, device
            ),
            req_to_token_pool=runner.req_to_token_pool,
            token_to_kv_pool=runner.token_to_kv_pool,
            attn_backend=runner.attn_backend,
            return_logprob=logprob_targets is not None,
            top_logprobs_nums=tops,
            input_logprob_starts=logprob_starts,
            input_logprob_targets=logprob_targets,
        )
        return runner.forward(batch), batch


def random_tokens(count: int, vocab_size: int, seed: int = 0) -> list[int]:
    return torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
