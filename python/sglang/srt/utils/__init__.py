from sglang.srt.utils.common import get_device_sm as get_device_sm
from sglang.srt.utils.common import kill_process_tree as kill_process_tree
