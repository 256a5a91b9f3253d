"""Save and load XTuner's training state with Holdfast, in the layout that its users resume from.

    class Engine(TrainEngineMixin, xtuner.v1.engine.TrainEngine): ...      below XTuner's own trainer
    engine = TrainEngine(model, optimizer)                                 the same, without XTuner
    run = TrainerCheckpoints(work_dir, engine, checkpoint_interval=500)    what XTuner's trainer does around it
    holdfast.HFExport(root, key_map=hf_key_map(model))                     an XTuner model, exported by a manager

    work_dir/.xtuner                             the record: which checkpoints there are (`XTunerMeta`)
    work_dir/<timestamp>/checkpoints/ckpt-step-N/weights/       model and optimizer: a checkpoint that stock DCP reads
                                                .../dataloader, lr_scheduler, train_state.json, trainer_config.*
                         checkpoints/snapshot-step-N/           the same, of which one is kept
                         hf-N, hf-latest                        exports, and a link to the newest

Guarantees: what stock XTuner wrote is loaded, its older ``model/`` and ``optimizer/`` too; it resumes from what is
written here. ``weights/`` is visible when it is whole, and in the record only after that. Futures are those of
`concurrent.futures`. XTuner is not imported, and needn't be installed.
"""

from __future__ import annotations

from holdfast.integrations.xtuner.engine import TrainEngine, TrainEngineMixin
from holdfast.integrations.xtuner.hf_layout import hf_key_map
from holdfast.integrations.xtuner.meta import ExpInfo, XTunerMeta
from holdfast.integrations.xtuner.trainer import TrainerCheckpoints

__all__ = ["ExpInfo", "TrainEngine", "TrainEngineMixin", "TrainerCheckpoints", "XTunerMeta", "hf_key_map"]
