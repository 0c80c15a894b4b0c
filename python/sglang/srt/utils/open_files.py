"""How many files, and so connections, a process may have open."""

import resource

# As SGLang: more clients than a server or a benchmark has.
WANTED = 65535


def raise_open_file_limit() -> None:
    """As many as the system permits, up to ``WANTED``: often it is 1024, and connections beyond that are reset."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if most == resource.RLIM_INFINITY else min(WANTED, most)
    if now != resource.RLIM_INFINITY and now < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
