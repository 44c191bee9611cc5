"""The safetensors of a folder, read without torch: names, types and shapes from the headers, values of the few tensors that rules look at.

    DIR/model.safetensors, or DIR/model.safetensors.index.json with the files that it names, or any DIR/*.safetensors

Nothing is trusted: sizes are bounded, an index names files of its own folder only, pickles are named and never opened.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from eyas.errors import ContractError

BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "F4": 4,
}  # fmt: skip
NUMPY = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "I16": "<i2", "U16": "<u2", "F16": "<f2", "I32": "<i4", "U32": "<u4", "F32": "<f4",
    "I64": "<i8", "U64": "<u8", "F64": "<f8",
}  # fmt: skip
INFINITE = {
    "BF16": (16, 0x7F80),
    "F16": (16, 0x7C00),
    "F32": (32, 0x7F800000),
    "F64": (64, 0x7FF0 << 48),
}  # bits without sign
FLOATS = (*INFINITE, "F8_E4M3", "F8_E5M2", "F4")
HEADER_BYTES, JSON_BYTES, VALUE_BYTES = 64 << 20, 32 << 20, 256 << 20  # at most
TENSORS = 200_000  # at most
PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"}
INDEX = "model.safetensors.index.json"
SCAN_BYTES, SCANNERS = 8 << 20, 2


class Stored(NamedTuple):
    """A tensor on disk."""

    name: str
    file: Path
    dtype: str  # as the header says it
    shape: tuple[int, ...]
    begin: int  # offset in the file
    size: int  # bytes


@dataclass(frozen=True)
class Weights:
    """What a folder holds. problems: why a file or tensor cannot be read, one sentence each."""

    folder: Path
    tensors: dict[str, Stored]
    problems: tuple[str, ...] = ()
    pickles: tuple[str, ...] = ()

    def values(self, name: str) -> np.ndarray:
        """A tensor's values; BF16 as float32. Raises ContractError for a type without numpy's, and for what is too large to look at."""
        t = self.tensors[name]
        if t.size > VALUE_BYTES:
            raise ContractError(f"{t.file}: {name} has {t.size:,} bytes, too many to look at")
        with t.file.open("rb") as f:
            f.seek(t.begin)
            raw = f.read(t.size)
        if len(raw) < t.size:
            raise ContractError(f"{t.file}: {name} ends too early")
        if t.dtype == "BF16":
            return (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4").reshape(t.shape)
        if t.dtype not in NUMPY:
            raise ContractError(f"{t.file}: {name} is {t.dtype}, whose values eyas does not read")
        return np.frombuffer(raw, NUMPY[t.dtype]).reshape(t.shape)

    def infinite(self) -> list[str]:
        """Names of the tensors that hold a NaN or an infinity; all values of all floating-point tensors are read."""
        parts = [
            (t, at)
            for t in self.tensors.values()
            if t.dtype in INFINITE
            for at in range(0, t.size, SCAN_BYTES)
        ]
        with ThreadPoolExecutor(SCANNERS) as pool:
            found = pool.map(lambda p: _infinite(*p), parts)
            return list(dict.fromkeys(t.name for (t, _), bad in zip(parts, found, strict=True) if bad))


def _infinite(t: Stored, at: int) -> bool:
    """Whether a part of a tensor holds bits of a NaN or an infinity, of either sign: two maxima, no copy."""
    bits, least = INFINITE[t.dtype]
    with t.file.open("rb") as f:
        f.seek(t.begin + at)
        raw = f.read(min(SCAN_BYTES, t.size - at))
    if not raw:
        return False
    signed = np.frombuffer(raw, f"<i{bits // 8}")
    return bool(signed.max() >= least or signed.view(f"<u{bits // 8}").max() >= least + (1 << (bits - 1)))


def read_json(path: Path) -> dict[str, Any]:
    """An object of bounded size and depth. Raises ContractError saying what the file is instead."""
    try:
        size = path.stat().st_size
        if size > JSON_BYTES:
            raise ContractError(f"{path} has {size:,} bytes; a config has thousands at most")
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        raise ContractError(f"{path} is missing; is this a drafter folder?") from e
    except (OSError, ValueError, RecursionError) as e:
        raise ContractError(f"{path} cannot be read as JSON ({str(e)[:200] or type(e).__name__})") from e
    if not isinstance(value, dict):
        raise ContractError(f"{path} holds {type(value).__name__}, not an object")
    return value


def opened(folder: Path) -> Weights:
    """The folder's tensors. Never raises for what the files hold: that is in `problems`."""
    tensors: dict[str, Stored] = {}
    problems: list[str] = []
    pickles = tuple(sorted(p.name for p in folder.iterdir() if p.suffix in PICKLES))
    for path in _files(folder, problems):
        try:
            for t in _header(path):
                if t.name in tensors:
                    problems.append(f"{path}: {t.name} is in {tensors[t.name].file.name} too")
                tensors[t.name] = t
        except (ContractError, OSError) as e:
            problems.append(str(e))
    return Weights(folder, tensors, tuple(problems), pickles)


def of_file(path: Path) -> Weights:
    """One file's tensors; what cannot be read is in `problems`."""
    try:
        return Weights(path.parent, {t.name: t for t in _header(path)})
    except (ContractError, OSError) as e:
        return Weights(path.parent, {}, (str(e),))


def _files(folder: Path, problems: list[str]) -> list[Path]:
    single, index = folder / "model.safetensors", folder / INDEX
    if index.is_file():
        try:
            named = read_json(index).get("weight_map")
        except ContractError as e:
            problems.append(str(e))
            named = None
        if isinstance(named, dict):
            return list(_inside(folder, index, sorted({str(v) for v in named.values()}), problems))
        problems.append(f"{index} has no weight_map")
    return [single] if single.is_file() else sorted(folder.glob("*.safetensors"))


def _inside(folder: Path, index: Path, names: list[str], problems: list[str]) -> Iterator[Path]:
    for name in names:
        if Path(name).name != name or name in (".", ".."):
            problems.append(
                f"{index} names {name[:100]!r}, which is not a file of this folder: it is not opened"
            )
        elif not (folder / name).is_file():
            problems.append(f"{index} names {name[:100]}, which is not there")
        else:
            yield folder / name


def _header(path: Path) -> Iterator[Stored]:
    """The tensors of one file. Raises ContractError where the header lies about the file."""
    size = path.stat().st_size
    with path.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if size < 8 or length > min(HEADER_BYTES, size - 8):
            raise ContractError(
                f"{path} is not a whole safetensors file ({size:,} bytes, header of {length:,}); fetch it again"
            )
        try:
            header = json.loads(f.read(length))
        except (ValueError, RecursionError) as e:
            raise ContractError(f"{path} has a header that is not JSON ({str(e)[:100]})") from e
    if not isinstance(header, dict) or len(header) > TENSORS:
        raise ContractError(f"{path} has a header that is no table of at most {TENSORS:,} tensors")
    for name, about in header.items():
        if name != "__metadata__":
            yield _stored(path, name, about, 8 + length, size)


def _stored(path: Path, name: str, about: Any, base: int, size: int) -> Stored:
    try:
        dtype, shape, (begin, end) = about["dtype"], tuple(about["shape"]), about["data_offsets"]
        whole = isinstance(dtype, str) and all(type(n) is int and n >= 0 for n in (*shape, begin, end))
    except (KeyError, TypeError, ValueError):
        whole, dtype = False, None
    if not whole or dtype not in BITS or len(shape) > 8:
        raise ContractError(
            f"{path}: {name[:100]} has a header entry that says no known type, shape and place"
        )
    if (math.prod(shape) * BITS[dtype] + 7) // 8 != end - begin or base + end > size:
        raise ContractError(
            f"{path}: {name[:100]} lies outside the file or has another size than its shape; fetch it again"
        )
    return Stored(name, path, dtype, shape, base + begin, end - begin)


Part = Stored | np.ndarray  # bytes of a file, taken over as they are, or new values
DTYPES = {np.dtype(kind): name for name, kind in NUMPY.items()}
COPY_BYTES = 16 << 20


def write(path: Path, parts: Mapping[str, Part], types: Mapping[str, str] | None = None) -> None:
    """A safetensors file of these tensors, in order of their names; large ones are copied in pieces. types: of values that are bits of
    a type without numpy's (BF16). Not atomic."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in sorted(parts):
        part = parts[name]
        size = part.nbytes if isinstance(part, np.ndarray) else part.size
        dtype = (types or {}).get(name) or (
            DTYPES[part.dtype] if isinstance(part, np.ndarray) else part.dtype
        )
        header[name] = {"dtype": dtype, "shape": list(part.shape), "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as f:
        f.write(len(raw).to_bytes(8, "little") + raw)
        for name in sorted(parts):
            for piece in _pieces(parts[name]):
                f.write(piece)
        f.flush()
        os.fsync(f.fileno())


def _pieces(part: Part) -> Iterator[bytes]:
    if isinstance(part, np.ndarray):
        yield np.ascontiguousarray(part).tobytes()
        return
    with part.file.open("rb") as f:
        f.seek(part.begin)
        left = part.size
        while left:
            piece = f.read(min(COPY_BYTES, left))
            if not piece:
                raise ContractError(f"{part.file}: {part.name} ends too early")
            left -= len(piece)
            yield piece
