"""The architectures to try: each class that transformers lists for a task, with the configuration it is built from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import transformers
from transformers.models.auto import modeling_auto

__all__ = ["TASKS", "Subject", "subjects"]

TASKS = {
    "causal LM": "CAUSAL_LM",
    "seq2seq LM": "SEQ_TO_SEQ_CAUSAL_LM",
    "masked LM": "MASKED_LM",
    "image classification": "IMAGE_CLASSIFICATION",
    "CTC": "CTC",
    "speech seq2seq": "SPEECH_SEQ_2_SEQ",
    "audio classification": "AUDIO_CLASSIFICATION",
    "video classification": "VIDEO_CLASSIFICATION",
    "masked images": "MASKED_IMAGE_MODELING",
    "semantic segmentation": "SEMANTIC_SEGMENTATION",
    "depth estimation": "DEPTH_ESTIMATION",
    "multimodal LM": "MULTIMODAL_LM",
    "object detection": "OBJECT_DETECTION",
    "zero-shot detection": "ZERO_SHOT_OBJECT_DETECTION",
    "universal segmentation": "UNIVERSAL_SEGMENTATION",
    "mask generation": "MASK_GENERATION",
    "keypoints": "KEYPOINT_DETECTION",
    "zero-shot classification": "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "time series": "TIME_SERIES_PREDICTION",
    "text to spectrogram": "TEXT_TO_SPECTROGRAM",
    "text to waveform": "TEXT_TO_WAVEFORM",
    "document QA": "DOCUMENT_QUESTION_ANSWERING",
    "visual QA": "VISUAL_QUESTION_ANSWERING",
    "question answering": "QUESTION_ANSWERING",
    "token classification": "TOKEN_CLASSIFICATION",
    "sequence classification": "SEQUENCE_CLASSIFICATION",
}
"""The names on the page, and those of transformers: MODEL_FOR_..._MAPPING_NAMES."""
_UNLISTED = {
    "time series": {
        "autoformer": "AutoformerForPrediction",
        "informer": "InformerForPrediction",
        "patchtsmixer": "PatchTSMixerForPrediction",
        "patchtst": "PatchTSTForPrediction",
        "time_series_transformer": "TimeSeriesTransformerForPrediction",
    },
}
"""Classes that transformers lists for no task of that kind."""


@dataclass(frozen=True)
class Subject:
    """A class to try: the task it is listed for first, its model type and its name."""

    task: str
    model_type: str
    class_name: str

    @property
    def config_class(self) -> type[transformers.PreTrainedConfig]:
        """The class of its configuration."""
        found: type[transformers.PreTrainedConfig] = getattr(transformers, self.class_name).config_class
        return found


def subjects() -> Iterator[Subject]:
    """Yield every class once, in the order of the tasks."""
    seen = set()
    for task, name in TASKS.items():
        listed = getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES")
        for model_type, classes in {**listed, **_UNLISTED.get(task, {})}.items():
            for class_name in [classes] if isinstance(classes, str) else classes:
                if class_name not in seen:
                    seen.add(class_name)
                    yield Subject(task, model_type, class_name)
