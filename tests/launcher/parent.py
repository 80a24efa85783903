"""A parent for the tests: launches worker_all_reduce in the folder argv[1] and prints the outcome as JSON."""

import json
import sys

from exp.launcher import describe_failure
from exp.launcher.torchrun import TorchrunLauncher
from exp.runfolder import RunFolder

if __name__ == "__main__":
    folder = RunFolder(sys.argv[1])
    folder.create()
    settings = json.loads(sys.argv[2])
    nproc = settings.pop("nproc")
    outcome = TorchrunLauncher(worker="tests.launcher.worker_all_reduce", **settings).launch(folder, nproc)
    print(
        json.dumps(
            {
                "exit_code": outcome.exit_code,
                "restarts": outcome.restarts,
                "failed": [failure.rank for failure in outcome.failures],
                "first": vars(outcome.failures[0]) if outcome.failures else None,
                "interrupted_by": outcome.interrupted_by,
                "text": describe_failure(outcome),
            }
        )
    )
