"""The marker that SGLang's test files carry for its continuous integration."""


def register_cuda_ci(
    est_time: float,
    suite: str | None = None,
    nightly: bool = False,
    disabled: str | None = None,
    *,
    stage: str | None = None,
    runner_config: str | None = None,
    in_process_group: str | None = None,
) -> None:
    """Does nothing, as in SGLang: what it is called with is read from the file's text, by SGLang's CI alone."""
