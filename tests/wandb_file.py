"""Reads a `.wandb` transaction log: LevelDB's log format behind a header of W&B's own."""

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from wandb.proto.wandb_internal_pb2 import Record

HEADER = struct.pack("<4sHB", b":W&B", 0xBEE1, 0)  # identity, magic, version; part of the first block
BLOCK = 32 * 1024
CHUNK_HEADER = struct.Struct("<IHB")  # CRC-32 of type and payload (LevelDB has a masked CRC-32C), length, type
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def read_records(path: Path) -> Iterator[Record]:
    """Yield the log's records in order; a ValueError names the first byte that breaks the format."""
    pending: bytes | None = None
    for offset, kind, payload in _chunks(path.read_bytes()):
        if (pending is None) != (kind in (FULL, FIRST)):
            raise ValueError(f"{path}: chunk type {kind} out of order at byte {offset}")
        pending = (pending or b"") + payload
        if kind in (FULL, LAST):
            yield Record.FromString(pending)
            pending = None
    if pending is not None:
        raise ValueError(f"{path}: the last record is cut off")


def _chunks(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield (offset, type, payload) of each chunk, none of which crosses a block's end."""
    if not data.startswith(HEADER):
        raise ValueError(f"not a .wandb file: it begins with {data[: len(HEADER)]!r}")
    offset = len(HEADER)
    while offset < len(data):
        room = BLOCK - offset % BLOCK
        if room < CHUNK_HEADER.size:
            if any(data[offset : offset + room]):
                raise ValueError(f"a block's padding is not zero at byte {offset}")
            offset += room
            continue
        checksum, length, kind = CHUNK_HEADER.unpack_from(data, offset)
        payload = data[offset + CHUNK_HEADER.size : offset + CHUNK_HEADER.size + length]
        if kind not in (FULL, FIRST, MIDDLE, LAST) or length > room - CHUNK_HEADER.size or len(payload) != length:
            raise ValueError(f"broken chunk of type {kind} and length {length} at byte {offset}")
        if zlib.crc32(bytes([kind]) + payload) != checksum:
            raise ValueError(f"wrong checksum at byte {offset}")
        yield offset, kind, payload
        offset += CHUNK_HEADER.size + length
