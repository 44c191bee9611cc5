"""Writing safetensors so that a full disk is an OSError, as it is for every other file."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def save(tensors: "dict[str, Tensor]", path: Path, metadata: dict[str, str]) -> None:
    """Write tensors to `path`. At most one metadata key: several have no fixed order, and files would differ.

    Raises OSError when the file cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata=metadata)
    except SafetensorError as e:
        raise OSError(None, str(e), str(path)) from e
