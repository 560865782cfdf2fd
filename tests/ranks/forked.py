"""`forked.py RANKS FOUND run ...`: session.py on several ranks, like torchrun, but as forks of one process.

Most of a rank's start is the import of torch and transformers, which happens only once here.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import session
import transformers.models.llama.modeling_llama  # noqa: F401


def main() -> None:
    ranks, found = int(sys.argv.pop(1)), Path(sys.argv.pop(1))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            os.environ |= {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "forked",
            }  # fmt: skip
            session.run(found)
        children.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    sys.exit(max(codes))


if __name__ == "__main__":
    main()
