"""The request of ``/update_weights_from_disk``, with SGLang's fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from sglang.srt.request_validation import convert, select_supported

# Fields that ask for nothing with these values. The caches of prefixes and (on a GPU) of torch's allocator are always
# emptied, and decode graphs always recorded again.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "flush_cache": (True,),
    "torch_empty_cache": (False, True),
    "is_async": (False,),
    "keep_pause": (False,),
    "recapture_cuda_graph": (False, True),
    "token_step": (0,),
    "manifest": (),
    "rid": (),
    "http_worker_ipc": (),
}


class UpdateWeightsRequest(msgspec.Struct, kw_only=True):
    """``load_format`` None: the one that the server uses; ``abort_all_requests``: don't wait for running requests;
    ``weight_version``: a name for the new weights, shown in ``/get_model_info``."""

    model_path: str
    load_format: str | None = None
    abort_all_requests: bool = False
    weight_version: str | None = None


def parse_update_weights_request(body: Mapping[str, Any]) -> UpdateWeightsRequest:
    """Raises:
    RequestError: a field is unknown, of the wrong type, or asks for what is not supported.
    """
    return convert(select_supported(body, UpdateWeightsRequest.__struct_fields__, NEUTRAL_VALUES), UpdateWeightsRequest)
