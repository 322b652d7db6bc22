"""What `initialize` and a trainer with DeepSpeed say to mistakes, as one line of JSON: the error of each, by name."""

import contextlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed_engines  # isort: skip, sets the variables that DeepSpeed reads
import deepspeed
import torch
from torch import nn
from transformers import Trainer, TrainerCallback

import hugging_face_flag
import recollect
from hugging_face_trainers import arguments, llama, texts
from recollect.integrations.deepspeed import checkpointing, initialize
from recollect.integrations.transformers import MemoryBudget

SAID: dict[str, str] = {}


def _try(name: str, run: Callable[[], object]) -> None:
    try:
        SAID[name] = f"fine: {run()}"
    except Exception as error:
        SAID[name] = f"{type(error).__name__}: {error}"


def _engine(model: Any = None, *, budget: Any = "1GiB", config: Any = None, stage: int = 3, **given: Any) -> Any:
    model = llama() if model is None else model
    given.setdefault("optimizer", torch.optim.SGD(model.parameters(), lr=0.1))
    whole = deepspeed_engines.config(stage, **(config or {}))
    return initialize(model=model, config=whole, memory_budget=budget, **given)[0]


def _step(engine: Any) -> Any:
    batch = torch.stack([row["input_ids"] for row in texts(4)])
    loss = engine(input_ids=batch, labels=batch).loss
    engine.backward(loss)
    engine.step()
    return loss


def _planned() -> nn.Module:
    model = llama()
    batch = torch.stack([row["input_ids"] for row in texts(4)])
    recollect.fit(model, {"input_ids": batch, "labels": batch}, "80%", fake=True)
    return model


def _on_a_batch(stage: int) -> object:
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=deepspeed_engines.config(stage))[0]
    batch = torch.stack([row["input_ids"] for row in texts(4)])
    return recollect.fit(engine, {"input_ids": batch, "labels": batch}, "80%")


def _attached(stage: int) -> object:
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, inner, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=deepspeed_engines.config(stage))
    return recollect.attach(engine, inner, "1GiB")


def _made_twice() -> str:
    engine = _engine(stage=1)
    first = engine.memory_budget
    again, inner, *_ = initialize(model=engine, memory_budget="2GiB")
    _step(engine)
    return f"{again is engine} {inner is engine.optimizer} {first.is_removed} {engine.memory_budget.num_steps}"


def _flagged() -> nn.Module:
    model = llama().train()
    hugging_face_flag.enable(model)
    return model


class _Two:
    def get_model_parallel_world_size(self) -> int:
        return 2


def _from_a_file() -> str:
    whole = deepspeed_engines.config(1, recollect={"memory_budget": "1GiB", "on_larger": "warn"})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text("# with a comment\n" + json.dumps(whole))
        model = llama()
        engine, *_ = initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=str(path))
    _step(engine)
    text: str = engine.memory_budget.report()
    engine.memory_budget.remove()
    return text


def _removed() -> str:
    engine = _engine(stage=1)
    engine.memory_budget.remove()
    engine.memory_budget.remove()
    _step(engine)
    return f"{engine.memory_budget.num_steps == 0} {not recollect.applied_to(engine.module)}"


def _old() -> object:
    now, deepspeed.__version__ = deepspeed.__version__, "0.15.4"
    try:
        return _engine()
    finally:
        deepspeed.__version__ = now


def _pipeline() -> object:
    return _engine(deepspeed.PipelineModule([nn.Linear(4, 4), nn.Linear(4, 4)], num_stages=1))


def _attached_pipeline(interval: int = 0, **settings: Any) -> str:
    """Whether a stage without ZeRO has the same weights with a plan, and its peak in percent of the one without."""
    ends = []
    for budget in (None, "90%"):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4)]
        model = deepspeed.PipelineModule(
            layers, num_stages=1, loss_fn=nn.functional.mse_loss, activation_checkpoint_interval=interval
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        config = {"train_micro_batch_size_per_gpu": 256, "gradient_accumulation_steps": 2, **settings}
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        if budget is not None:
            attached = recollect.attach(engine, optimizer, budget, log=lambda line: None)
        batches = iter([(torch.randn(256, 16), torch.randn(256, 16)) for _ in range(6)])
        for _ in range(3):
            engine.train_batch(batches)
        ends.append(list(model.parameters()))
    percents = [100 * step.plan.predicted_peak_bytes // step.plain_peak_bytes for step in attached.planned]
    return f"{all(map(torch.equal, *ends))} {percents}"


def _trainer(budget: Any, *callbacks: Any, stage: int = 3, config: Any = None) -> Trainer:
    with tempfile.TemporaryDirectory() as folder:
        whole = deepspeed_engines.config(stage, **(config or {}))
        args = arguments(folder, deepspeed=whole, gradient_accumulation_steps=1, max_steps=3, log_level="error")
    return Trainer(llama(), args, train_dataset=texts(), callbacks=[budget, *callbacks])


def _begin_by_hand() -> None:
    args = _trainer(MemoryBudget("1GiB")).args
    MemoryBudget("1GiB").on_train_begin(args, None, None, model=llama())


class _Ending(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            raise KeyboardInterrupt


def _interrupted() -> bool:
    """Whether a trainer's model and engine are plain after an interrupt."""
    trainer = _trainer(MemoryBudget("90%"), _Ending(), stage=2)
    with contextlib.suppress(KeyboardInterrupt):
        trainer.train()
    engine: Any = trainer.model_wrapped
    forwards = [vars(module).get("forward") for module in engine.module.modules()]
    return engine.global_steps == 2 and "step" not in vars(engine) and not any("recollect" in str(f) for f in forwards)


def _section(**settings: Any) -> dict[str, Any]:
    return {"activation_checkpointing": settings}


def main() -> None:
    deepspeed.init_distributed(dist_backend="gloo")
    # The first: what others leave in memory counts.
    _try("pipeline, attached", _attached_pipeline)
    _try("pipeline, checkpointed", lambda: _attached_pipeline(interval=1))
    _try(
        "pipeline, ZeRO", lambda: _attached_pipeline(zero_optimization={"stage": 1}, zero_allow_untested_optimizer=True)
    )
    _try("plan", lambda: _engine(_planned()))
    _try("engine, stage 3", lambda: _on_a_batch(3))
    _try("attach, stage 1", lambda: _attached(1))
    _try("flag", lambda: _engine(_flagged()))
    _try("partition", lambda: _engine(config=_section(partition_activations=True)))
    _try("unknown key", lambda: _engine(config=_section(partition_activation=True)))
    _try("own unknown key", lambda: _engine(config={"recollect": {"budget": "1GiB"}}))
    _try("said twice", lambda: _engine(budget="2GiB", config={"recollect": {"memory_budget": "1GiB"}}))
    _try("tensor parallel", lambda: _engine(config={"tensor_parallel": {"autotp_size": 2}}))
    _try("mpu", lambda: _engine(mpu=_Two()))
    _try("hybrid", lambda: _engine(config={"hybrid_engine": {"enabled": True}}))
    _try("compile", lambda: _engine(config={"compile": {"deepcompile": True}}))
    _try("pipeline", _pipeline)
    _try("no optimizer", lambda: _engine(stage=0, optimizer=None))
    _try("no budget", lambda: _engine(budget=None))
    _try("too small", lambda: _step(_engine(budget=1, stage=2)))
    _try("unknown argument", lambda: _engine(memory_bugdet=1))
    _try("old", _old)
    _try("in the file", _from_a_file)
    _try("removed", _removed)
    partitioned = _section(partition_activations=True)
    _try("trainer: partition", lambda: _trainer(MemoryBudget("1GiB"), config=partitioned))
    said = {"recollect": {"memory_budget": "1GiB"}}
    _try("trainer: said twice", lambda: _trainer(MemoryBudget("2GiB"), config=said))
    _try("trainer: said once", lambda: type(_trainer(MemoryBudget(), config=said)).__name__)
    _try("trainer: by hand", _begin_by_hand)
    _try("trainer: interrupted", _interrupted)
    _try("made", _made_twice)
    _try("made with others", lambda: initialize(model=_engine(stage=1), config={}))
    # Both stay so for the rest of the process.
    checkpointing.configure(None)
    _try("ours configured", _engine)
    deepspeed.checkpointing.configure(None)
    _try("configured", _engine)
    _try("both", lambda: checkpointing.configure(None))
    print(json.dumps(SAID), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
