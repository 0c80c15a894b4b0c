"""SGLang's benchmark commands: ``bench_serving``, ``bench_one_batch`` and ``bench_one_batch_server``."""
