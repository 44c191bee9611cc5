"""What a server loads before it serves text: an image processor under remote code, which is never asked for an image here."""

from transformers.image_processing_utils import BaseImageProcessor


class StandinImageProcessor(BaseImageProcessor):
    def __init__(self, media_proc_cfg, **kwargs):
        super().__init__(**kwargs)
        self.media_proc_cfg = media_proc_cfg
        self.num_frames_per_chunk = media_proc_cfg["temporal_merge_kernel_size"]

    def media_tokens_calculator(self, media):
        raise NotImplementedError("the stand-in sees no images")
