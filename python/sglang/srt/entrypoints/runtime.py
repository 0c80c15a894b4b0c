"""The scheduler's processes and the :class:`TokenizerManager` that talks to them: for server and ``Engine``."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from typing import Any

import msgspec

from sglang import __version__
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.constrained.grammar_manager import GrammarManager
from sglang.srt.entrypoints.nodes import Nodes, make_nodes
from sglang.srt.entrypoints.openai.settings import OpenAISettings
from sglang.srt.entrypoints.scheduler_process import RunScheduler, SchedulerProcesses
from sglang.srt.errors import RequestError, StartupError
from sglang.srt.layers.quantization import get_quantization
from sglang.srt.layers.quantization.fp4_utils import initialize_fp4_gemm_config
from sglang.srt.managers.generate_request import parse_generate_request
from sglang.srt.managers.hf_tokenizer import get_tokenizer
from sglang.srt.managers.io_struct import PortArgs
from sglang.srt.managers.request_state import ServiceError
from sglang.srt.managers.scheduler_channel import SchedulerChannel
from sglang.srt.managers.scheduler_main import run_scheduler_process
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.managers.weight_update_request import UpdateWeightsRequest
from sglang.srt.observability.metrics_collector import MetricsCollector
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.cache_folder import ensure_cache_folder
from sglang.srt.utils.request_logger import RequestLogger

logger = logging.getLogger(__name__)

WARMUP_REQUEST = {"text": "The capital city of France is", "sampling_params": {"temperature": 0, "max_new_tokens": 8}}


class Runtime:
    """Made by checking everything that is cheap to check; no process is started and no weight is read before
    :meth:`start`.

    Raises:
        StartupError: the server can't start as asked.
    """

    def __init__(self, server_args: ServerArgs, run_scheduler: RunScheduler = run_scheduler_process) -> None:
        self.server_args = server_args
        self.model_config = ModelConfig.from_server_args(server_args)
        ensure_cache_folder()
        quantized = get_quantization(self.model_config, server_args) is not None
        initialize_fp4_gemm_config(server_args, self.model_config.dtype, quiet=not quantized)
        own_tokenizer = server_args.tokenizer_path == server_args.model_path
        self.tokenizer = get_tokenizer(
            self.model_config.model_path if own_tokenizer else server_args.tokenizer_path,
            trust_remote_code=server_args.trust_remote_code,
            revision=server_args.revision if own_tokenizer else None,
        )
        self.openai = OpenAISettings.create(server_args, self.tokenizer, self.model_config)
        self._run_scheduler = run_scheduler
        self._port_args: PortArgs | None = None
        self._channel: SchedulerChannel | None = None
        self._manager: TokenizerManager | None = None
        self._processes: SchedulerProcesses | None = None
        self._death: asyncio.Future[str] | None = None
        self.nodes: Nodes | None = None
        self.scheduler_info: dict[str, Any] = {}
        self.metrics: MetricsCollector | None = None
        self.weight_version = "default"

    @property
    def manager(self) -> TokenizerManager:
        assert self._manager is not None, "start() comes first"
        return self._manager

    @property
    def death(self) -> asyncio.Future[str]:
        """Done when the scheduler has died by itself and everyone who waited for it got an error: its message."""
        assert self._death is not None, "start() comes first"
        return self._death

    async def start(self) -> None:
        """Start the scheduler, wait until it serves, and run one request unless ``--skip-server-warmup``.

        Raises:
            StartupError: the scheduler could not start. :meth:`stop` still has to be called.
        """
        self._port_args = PortArgs.create()
        self.nodes = make_nodes(self.server_args, self.model_config)
        if self.nodes is not None:
            rendezvous = await self.nodes.meet()
            self._port_args = msgspec.structs.replace(self._port_args, rendezvous=rendezvous)
        self._channel = SchedulerChannel(self._port_args)
        self._manager = TokenizerManager(
            self.tokenizer, self.model_config.vocab_size, self.model_config.context_len, self._channel
        )
        if self.server_args.grammar_backend == "xgrammar":
            self._manager.grammars = GrammarManager(
                self._manager.decoder,
                self.model_config.vocab_size,
                self.model_config.eos_token_ids,
                any_whitespace=not self.server_args.constrained_json_disable_any_whitespace,
                max_whitespace_cnt=self.server_args.constrained_json_max_whitespace_cnt,
            )
        self._processes = SchedulerProcesses(self._run_scheduler, self.server_args, self._port_args, self.nodes)
        info = await self._processes.ready()
        self._death = asyncio.ensure_future(self._watch(self._processes, self._manager))
        self.scheduler_info = {name: value for name, value in info.items() if name != "status"}
        self._manager.max_req_input_len = info.get("max_req_input_len", self._manager.max_req_input_len)
        self._observe(self._manager)
        self._manager.start()
        if not self.server_args.skip_server_warmup:
            await self._warm_up()

    def _observe(self, manager: TokenizerManager) -> None:
        args = self.server_args
        if args.enable_metrics:
            self.metrics = MetricsCollector(args.served_model_name, self.scheduler_info)
            manager.observers.append(self.metrics)
        if args.log_requests:
            manager.observers.append(RequestLogger(args.log_requests_level))

    async def _warm_up(self) -> None:
        try:
            async for _ in self.manager.generate(parse_generate_request(WARMUP_REQUEST), log_metrics=False):
                pass
        except RequestError as error:  # a context too small for the request says nothing against the server
            logger.warning("The warm-up request was skipped: %s", error)
        except ServiceError as error:
            raise StartupError(f"The warm-up request failed: {error}") from error

    async def _watch(self, processes: SchedulerProcesses, manager: TokenizerManager) -> str:
        message = await processes.died()
        logger.error(message)
        manager.scheduler_died(message)
        return message

    async def update_weights_from_disk(self, request: UpdateWeightsRequest) -> tuple[bool, str]:
        """Replace the weights; whether it was done, and SGLang's message or what went wrong. The tokenizer stays, and
        so does the name under which the model is served. A caller that is cancelled stops it only as long as running
        requests are waited for.

        Raises:
            ServiceError: the scheduler died.
        """
        load_format = request.load_format or self.server_args.load_format

        def record() -> None:
            changes: dict[str, Any] = {"model_path": request.model_path, "load_format": load_format, "revision": None}
            self.server_args = dataclasses.replace(self.server_args, **changes)
            if request.weight_version is not None:
                self.weight_version = request.weight_version

        success, message = await self.manager.update_weights_from_disk(
            request.model_path, load_format, record, abort_all_requests=request.abort_all_requests
        )
        if success and request.weight_version is not None:
            message += f" Weight version updated to {request.weight_version}."
        return success, message

    async def server_info(self) -> dict[str, Any]:
        """SGLang's ``/server_info``: the arguments, what the scheduler reported, and its state now."""
        return {
            **self.server_args.shown(),
            **self.scheduler_info,
            "internal_states": [await self.manager.internal_state()],
            "version": __version__,
        }

    def stop(self, grace: float = 10.0) -> None:
        """End the scheduler (by force after ``grace`` seconds) and remove the sockets. Safe to call at any time."""
        if self._death is not None and not self._death.done():
            self._death.cancel()
        if self._manager is not None and self._manager.grammars is not None:
            self._manager.grammars.close()
        if self._processes is not None:
            self._processes.stop(grace)
            self._processes = None
        if self.nodes is not None:
            self.nodes.close()
            self.nodes = None
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._port_args is not None:
            self._port_args.remove()
            self._port_args = None
