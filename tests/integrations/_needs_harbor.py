"""What tests with Harbor need of the machine. Modules that import this one are skipped, with the reason, where it is missing."""

import subprocess

import pytest

from compactionrl.sandboxes.bwrap import bwrap_path
from compactionrl.sandboxes.protocol import SandboxError

pytest.importorskip("harbor", reason="Harbor is not installed: make harbor")
try:
    PROBE = [bwrap_path(), "--ro-bind", "/", "/", "--unshare-all", "true"]
except SandboxError as error:
    pytest.skip(str(error), allow_module_level=True)
if subprocess.run(PROBE, capture_output=True).returncode:
    pytest.skip("bubblewrap does not work here", allow_module_level=True)

AGENT = "compactionrl.integrations.harbor:CompactionAgent"
BWRAP = "compactionrl.integrations.harbor:BwrapEnvironment"
