"""What `actor.imports` names in tests: each rank that imports it runs megatron-core without CUDA
from then on (see cpu_megatron.py).
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import cpu_megatron

cpu_megatron.patch_cuda()
cpu_megatron.CudaOnCpu().__enter__()
