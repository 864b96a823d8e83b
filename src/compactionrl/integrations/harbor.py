"""Harbor with our agent, our sandbox, or both; needs Python 3.12 and `pip install 'compactionrl[harbor]'`:

    harbor run -p TASKS -e compactionrl.integrations.harbor:BwrapEnvironment \\
        -a compactionrl.integrations.harbor:CompactionAgent --ak api_base=http://127.0.0.1:8000 --ak context_limit=32k
"""

from compactionrl.integrations.harbor_agent import CompactionAgent
from compactionrl.integrations.harbor_environment import BwrapEnvironment

__all__ = ["BwrapEnvironment", "CompactionAgent"]
