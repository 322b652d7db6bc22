"""A training script as Megatron-LM has them: pretrain.py CHECKPOINT FIRST LAST."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
    import megatron_core_shim as shim

    shim.install()
    from megatron.training.training import pretrain

    pretrain(Path(sys.argv[1]), *map(int, sys.argv[2:]))
