"""The scheduler's process: start, readiness, end. With tensor parallelism there is one per rank."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection

import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import close_tensor_parallel, init_tensor_parallel
from sglang.srt.errors import StartupError
from sglang.srt.layers.quantization.fp4_utils import initialize_fp4_gemm_config
from sglang.srt.managers.channel import Channel, RankChannel, ZmqChannel
from sglang.srt.managers.io_struct import PortArgs
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.model_summary import summarize
from sglang.srt.platforms import resolve_device
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.log import configure_logging
from sglang.srt.utils.net import Rendezvous

logger = logging.getLogger(__name__)

# Between ranks: longer than the parent takes to notice that one of its children has died.
GRACE_FOR_THE_CAUSE = 1.0
# Characters of its end, so that it fits into a pipe that nobody reads.
LONGEST_TRACEBACK = 20_000


def run_scheduler_process(
    server_args: ServerArgs, port_args: PortArgs, ready_writer: Connection, tp_rank: int = 0
) -> None:
    """Body of the scheduler's process, a child of the HTTP process; one of ``server_args.tp_size``.

    Sends one dictionary through ``ready_writer``: ``status`` "ready" with the sizes the parent needs, or "error" with
    ``message`` and ``exit_code``. Then serves until SIGTERM, which lets running requests finish. Exit status 0 after
    SIGTERM, else that of the error, which is in the log, and whose ``traceback`` is sent too.
    """
    several = server_args.tp_size > 1
    quiet = tp_rank > 0 and server_args.log_level in ("debug", "info")
    configure_logging("warning" if quiet else server_args.log_level, f" TP{tp_rank}" if several else "")
    # Control-C in a terminal reaches all processes; what to do about it is for the parent to say.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        scheduler, channel = _make_scheduler(server_args, port_args, tp_rank)
    except Exception as error:
        exit_code, message = 1, f"{type(error).__name__}: {error}"
        if isinstance(error, StartupError):
            exit_code, message = error.exit_code, str(error)
        else:
            _let_the_cause_come_first(several)
            logger.exception("The scheduler could not start.")
        ready_writer.send({"status": "error", "message": message, "exit_code": exit_code})
        sys.exit(exit_code)
    state = scheduler.get_internal_state() | summarize(scheduler.model_runner)
    ready_writer.send({"status": "ready", "max_req_input_len": scheduler.max_req_input_len, **state})
    try:
        scheduler.event_loop()
        close_tensor_parallel(scheduler.model_runner.tp)
    except Exception:
        _let_the_cause_come_first(several)
        logger.exception("The scheduler hit an exception and ends.")
        ready_writer.send({"status": "error", "traceback": traceback.format_exc()[-LONGEST_TRACEBACK:]})
        sys.exit(1)
    finally:
        channel.close()


def _let_the_cause_come_first(several: bool) -> None:
    """A rank whose peer has died fails in its next collective. The parent ends it while it is in here, so that only
    the peer's death is reported."""
    if several:
        time.sleep(GRACE_FOR_THE_CAUSE)


def make_model_runner(server_args: ServerArgs, rendezvous: Rendezvous, tp_rank: int, quiet: bool = True) -> ModelRunner:
    """The model of this process, which is one of ``server_args.tp_size`` ranks, on its device.

    ``rendezvous`` is where ranks meet, if there are several. ``quiet`` leaves the choice of the FP4 backend out of the
    log, where the parent has logged it.

    Raises:
        StartupError: as :class:`ModelRunner`.
    """
    device = resolve_device(server_args.device, tp_rank % server_args.ranks_per_node)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif "OMP_NUM_THREADS" not in os.environ:
        # More threads than cores wait for each other.
        torch.set_num_threads(max(1, torch.get_num_threads() // server_args.ranks_per_node))
    model_config = ModelConfig.from_server_args(server_args)
    initialize_fp4_gemm_config(server_args, model_config.dtype, quiet=quiet)
    tp = init_tensor_parallel(tp_rank, server_args.tp_size, device, rendezvous)
    return ModelRunner(server_args, model_config, tp)


def _make_scheduler(server_args: ServerArgs, port_args: PortArgs, tp_rank: int) -> tuple[Scheduler, Channel]:
    model_runner = make_model_runner(server_args, port_args.rendezvous, tp_rank)
    tp = model_runner.tp
    channel = ZmqChannel(port_args) if tp.size == 1 else RankChannel(tp, port_args)
    return Scheduler(server_args, model_runner.model_config, model_runner, channel), channel
