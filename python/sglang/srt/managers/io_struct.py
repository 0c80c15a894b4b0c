"""Messages between the HTTP/tokenizer process and the scheduler process, encoded as MessagePack.

No pickle: a decoder accepts exactly the types below.
"""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from sglang.srt.constrained.xgrammar_backend import GrammarSource, Vocabulary
from sglang.srt.errors import StartupError
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.net import Rendezvous

# Unix has room for about 104 bytes of socket path; "/sglang-xxxxxxxx/scheduler" comes behind.
_LONGEST_SOCKET_FOLDER = 75


class PortArgs(msgspec.Struct, frozen=True, kw_only=True):
    """The two ZMQ endpoints between the processes. The receiving (PULL) side binds, the sending (PUSH) side connects.

    The scheduler binds ``scheduler_input_ipc``; the HTTP process binds ``tokenizer_ipc`` before it starts the other.
    ``rendezvous`` is where tensor-parallel ranks find each other.
    """

    scheduler_input_ipc: str
    tokenizer_ipc: str
    rendezvous: Rendezvous

    @classmethod
    def create(cls) -> "PortArgs":
        """Endpoints in a new directory that only this user can enter; :meth:`remove` deletes it.

        Raises:
            StartupError: the path of the directory for temporary files is too long for a socket.
        """
        parent = tempfile.gettempdir()
        if len(parent) > _LONGEST_SOCKET_FOLDER:
            raise StartupError(f"{parent} is too long a path for sockets; set TMPDIR to a shorter one")
        try:
            folder = tempfile.mkdtemp(prefix="sglang-", dir=parent)
        except OSError as error:
            raise StartupError(f"can't make a folder for sockets in {parent}: {error.strerror}; set TMPDIR") from None
        return cls(
            scheduler_input_ipc=f"ipc://{folder}/scheduler",
            tokenizer_ipc=f"ipc://{folder}/tokenizer",
            rendezvous=Rendezvous.on_this_machine(f"{folder}/ranks"),
        )

    def remove(self) -> None:
        """Delete the sockets and their directory; safe to call twice."""
        shutil.rmtree(Path(self.tokenizer_ipc.removeprefix("ipc://")).parent, ignore_errors=True)


class TokenizedGenerateReqInput(msgspec.Struct, tag=True, kw_only=True):
    """One request, tokenised and validated.

    ``logprob_start_len`` is the first prompt position whose log-probability is wanted; ``len(input_ids)`` means
    none (output tokens only). ``token_ids_logprob``: tokens whose log-probability is wanted at every position.
    ``grammar`` is the number of a :class:`LoadGrammarReq` that the output has to follow.
    """

    rid: str
    input_ids: list[int]
    sampling_params: SamplingParams
    return_logprob: bool = False
    logprob_start_len: int = 0
    top_logprobs_num: int = 0
    token_ids_logprob: list[int] = []
    grammar: int | None = None


class AbortReq(msgspec.Struct, tag=True, kw_only=True):
    """Stop a request and free what it holds; unknown ids are ignored (it may just have finished)."""

    rid: str
    message: str = "The request was aborted."
    status_code: int = 499


class LoadVocabularyReq(msgspec.Struct, tag=True, kw_only=True):
    """For which grammars are compiled; comes once, before the first of them."""

    vocabulary: Vocabulary


class LoadGrammarReq(msgspec.Struct, tag=True, kw_only=True):
    """A grammar that has been tried; ``forget`` has the numbers of those that will not be asked for again."""

    number: int
    source: GrammarSource
    forget: list[int] = []


class FlushCacheReq(msgspec.Struct, tag=True, kw_only=True):
    """Empty the prefix cache; refused while requests are running."""

    call_id: str


class UpdateWeightFromDiskReqInput(msgspec.Struct, tag=True, kw_only=True):
    """Serve the weights of another checkpoint from now on; refused while requests are running. The reply's data has a
    ``message``."""

    call_id: str
    model_path: str
    load_format: str


class GetInternalStateReq(msgspec.Struct, tag=True, kw_only=True):
    """Ask for the scheduler's state (``/get_server_info``)."""

    call_id: str


class ShutdownReq(msgspec.Struct, tag=True, kw_only=True):
    """End when nothing is left to compute; what SIGTERM is to the ranks of a scheduler."""


class ControlReply(msgspec.Struct, tag=True, kw_only=True):
    """Answer to a request with a ``call_id``."""

    call_id: str
    success: bool
    data: dict[str, Any] = {}


# (log-probability, token id); the log-probability of a prompt's first token is None.
TokenLogprob = tuple[float | None, int]
TopLogprobs = list[TokenLogprob] | None


class ReqOutput(msgspec.Struct, kw_only=True):
    """What one request gained in one step.

    ``output_ids`` and the output log-probabilities hold only what is new since the last message; the input
    log-probabilities come once, with the first message. ``finish_reason`` is None while the request runs, else
    SGLang's dictionary: ``{"type": "stop", "matched": token id}``, ``{"type": "length", "length": n}`` or
    ``{"type": "abort", "message": text, "status_code": int}``.
    """

    rid: str
    output_ids: list[int]
    finish_reason: dict[str, Any] | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    input_token_logprobs: list[TokenLogprob] | None = None
    input_top_logprobs: list[TopLogprobs] | None = None
    output_token_logprobs: list[TokenLogprob] | None = None
    output_top_logprobs: list[TopLogprobs] | None = None
    input_token_ids_logprobs: list[TopLogprobs] | None = None
    output_token_ids_logprobs: list[TopLogprobs] | None = None


class LoadSnapshot(msgspec.Struct, kw_only=True):
    """What a scheduler is doing, by SGLang's names of ``/v1/loads``.

    Attributes:
        num_used_tokens: KV slots that requests hold; ``token_usage`` the same as a part of all slots.
        num_evictable_tokens: KV slots that only the prefix cache holds.
        gen_throughput: tokens per second in decode steps, measured lately; 0 while nothing runs.
        cache_hit_rate: part of the last prefill's prompt tokens that the prefix cache saved.
        num_retracted_reqs: since the start.
    """

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_used_tokens: int = 0
    num_evictable_tokens: int = 0
    token_usage: float = 0.0
    gen_throughput: float = 0.0
    cache_hit_rate: float = 0.0
    num_retracted_reqs: int = 0


class BatchTokenIDOutput(msgspec.Struct, tag=True, kw_only=True):
    """What one scheduler step produced, for all requests that have something new, and the load after it."""

    outputs: list[ReqOutput]
    load: LoadSnapshot = msgspec.field(default_factory=LoadSnapshot)


ToScheduler = (
    TokenizedGenerateReqInput
    | AbortReq
    | LoadVocabularyReq
    | LoadGrammarReq
    | FlushCacheReq
    | UpdateWeightFromDiskReqInput
    | GetInternalStateReq
    | ShutdownReq
)
ToTokenizer = BatchTokenIDOutput | ControlReply

_encoder = msgspec.msgpack.Encoder()
_to_scheduler: msgspec.msgpack.Decoder[ToScheduler] = msgspec.msgpack.Decoder(ToScheduler)
_to_ranks: msgspec.msgpack.Decoder[list[ToScheduler]] = msgspec.msgpack.Decoder(list[ToScheduler])
_to_tokenizer: msgspec.msgpack.Decoder[ToTokenizer] = msgspec.msgpack.Decoder(ToTokenizer)


def encode(message: ToScheduler | ToTokenizer) -> bytes:
    return _encoder.encode(message)


def decode_to_scheduler(data: bytes) -> ToScheduler:
    return _to_scheduler.decode(data)


def encode_to_ranks(messages: list[ToScheduler]) -> bytes:
    return _encoder.encode(messages)


def decode_to_ranks(data: bytes) -> list[ToScheduler]:
    return _to_ranks.decode(data)


def decode_to_tokenizer(data: bytes) -> ToTokenizer:
    return _to_tokenizer.decode(data)
