"""A scheduler process without a model: speaks the real messages and answers with the prompt's tokens, over and over.

``random_seed`` of the server arguments is the time of a step in milliseconds, or a ``Fault``, which is that of the last
tensor-parallel rank. Ranks other than 0 only wait. A prompt that starts with <pad> is refused as the real scheduler
refuses what it can't run. New weights are "loaded" in a fifth of a second if their path begins with "good"; from then
on prompts are read backwards. With ``max_queued_requests`` a request is refused while so many run.
"""

import os
import signal
import time
from enum import IntEnum
from multiprocessing.connection import Connection
from typing import Any

import zmq

from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenIDOutput,
    ControlReply,
    FlushCacheReq,
    GetInternalStateReq,
    LoadSnapshot,
    PortArgs,
    ReqOutput,
    TokenizedGenerateReqInput,
    UpdateWeightFromDiskReqInput,
    decode_to_scheduler,
    encode,
)
from sglang.srt.server_args import ServerArgs

EOS, PAD = 1, 2
MAX_REQ_INPUT_LEN = 1000


class Fault(IntEnum):
    REPORTS_AN_ERROR = 100_001
    DIES_EARLY = 100_002
    IS_NEVER_READY = 100_003
    DIES_OF_A_REQUEST = 100_004


def logprob(token_id: int) -> float:
    return -(token_id + 1) / 64


class _Running:
    def __init__(self, request: TokenizedGenerateReqInput) -> None:
        self.request = request
        self.done = 0

    def step(self) -> ReqOutput:
        request, params = self.request, self.request.sampling_params
        ids = request.input_ids
        limit = params.max_new_tokens
        new = [] if limit == 0 else [ids[self.done % len(ids)]]
        first = self.done == 0
        self.done += len(new)
        reason: dict[str, Any] | None = None
        if ids[0] == PAD:
            new, reason = [], {"type": "abort", "message": "The fake scheduler can't run this.", "status_code": 400}
        elif new and (new[0] in params.stop_token_ids or (new[0] == EOS and not params.ignore_eos)):
            reason = {"type": "stop", "matched": new[0]}
        elif self.done == limit:
            reason = {"type": "length", "length": limit}
        output = ReqOutput(
            rid=request.rid,
            output_ids=new,
            finish_reason=reason,
            prompt_tokens=len(ids),
            completion_tokens=self.done,
            cached_tokens=len(ids) // 2,
        )
        if request.return_logprob:
            k = request.top_logprobs_num
            output.output_token_logprobs = [(logprob(i), i) for i in new]
            output.output_top_logprobs = [[(logprob(i), i) for i in range(k)] for _ in new] if k else None
            chosen: list[tuple[float | None, int]] = [(logprob(i), i) for i in request.token_ids_logprob]
            output.output_token_ids_logprobs = [chosen for _ in new] if chosen else None
            if first:
                wanted = ids[request.logprob_start_len :]
                output.input_token_logprobs = [(logprob(i) if j else None, i) for j, i in enumerate(wanted)]
                if k:
                    top = [(logprob(i), i) for i in range(k)]
                    output.input_top_logprobs = [top if j else None for j in range(len(wanted))]
                if chosen:
                    output.input_token_ids_logprobs = [chosen if j else None for j in range(len(wanted))]
        return output


def _refusal(request: TokenizedGenerateReqInput) -> ReqOutput:
    reason = {"type": "abort", "message": "The request queue is full.", "status_code": 503}
    return ReqOutput(
        rid=request.rid, output_ids=[], finish_reason=reason, prompt_tokens=0, completion_tokens=0, cached_tokens=0
    )


def run_fake_scheduler(server_args: ServerArgs, port_args: PortArgs, ready_writer: Connection, tp_rank: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    fault = server_args.random_seed if tp_rank == server_args.tp_size - 1 else None
    if fault == Fault.REPORTS_AN_ERROR:
        ready_writer.send({"status": "error", "message": "The fake scheduler refuses to start.", "exit_code": 2})
        return
    if fault == Fault.DIES_EARLY:
        os._exit(7)
    if fault == Fault.IS_NEVER_READY:
        time.sleep(600)
    if tp_rank > 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ready_writer.send({"status": "ready", "max_req_input_len": 1})
        time.sleep(600)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    pull.bind(port_args.scheduler_input_ipc)
    push.connect(port_args.tokenizer_ipc)
    ready_writer.send({"status": "ready", "max_total_num_tokens": 4096, "max_req_input_len": MAX_REQ_INPUT_LEN})
    running: dict[str, _Running] = {}
    most = server_args.max_queued_requests
    aborted = 0
    backwards = False
    while True:
        while pull.poll(0 if running else 1000):
            match decode_to_scheduler(pull.recv()):
                case TokenizedGenerateReqInput() as request:
                    if fault == Fault.DIES_OF_A_REQUEST:
                        os._exit(8)
                    if most is not None and len(running) >= most:
                        push.send(encode(BatchTokenIDOutput(outputs=[_refusal(request)])))
                        continue
                    if backwards:
                        request.input_ids.reverse()
                    running[request.rid] = _Running(request)
                case AbortReq(rid=rid):
                    aborted += running.pop(rid, None) is not None
                case FlushCacheReq(call_id=call_id):
                    push.send(encode(ControlReply(call_id=call_id, success=not running)))
                case UpdateWeightFromDiskReqInput(call_id=call_id, model_path=path, load_format=load_format):
                    time.sleep(0.2)
                    good = path.startswith("good") and not running
                    backwards ^= good
                    message = f"{path} as {load_format} with {len(running)} running"
                    push.send(encode(ControlReply(call_id=call_id, success=good, data={"message": message})))
                case GetInternalStateReq(call_id=call_id):
                    data = {
                        "pid": os.getpid(),
                        "#running": len(running),
                        "aborted": aborted,
                        "fp4_gemm_backend": "fake",
                    }
                    push.send(encode(ControlReply(call_id=call_id, success=True, data=data)))
        if running:
            time.sleep(server_args.random_seed / 1000)
            outputs = [state.step() for state in running.values()]
            left = sum(output.finish_reason is None for output in outputs)
            load = LoadSnapshot(num_running_reqs=left, num_used_tokens=10 * left, cache_hit_rate=0.5)
            push.send(encode(BatchTokenIDOutput(outputs=outputs, load=load)))
            for output in outputs:
                if output.finish_reason is not None:
                    del running[output.rid]
