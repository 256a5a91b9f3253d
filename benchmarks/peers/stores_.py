"""Ways to save to an object store and to load from it. Endpoint and credentials come from the environment.

What saves bytes without names saves the file that holds the state, as it lies in memory. Libraries are imported when a
contender starts: each has an environment of its own, in which the others' are missing.
"""

from __future__ import annotations

import io
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.contender import Contender
from benchmarks.peers.raw import in_threads

if TYPE_CHECKING:
    from collections.abc import Buffer

    from benchmarks.state import BenchState

PART_BYTES = 8 << 20
PUTS_AT_A_TIME = 8
GETS_AT_A_TIME = 16
"""What Holdfast has, and so all that can be told have."""


class StoreContender(Contender):
    """One way to save to a URL in place of a path."""

    def prepare(self, place: str) -> None:
        """Do what a process does once, before its first save to a bucket."""


class Raw(StoreContender):
    """obstore with nothing around it."""

    def start(self) -> None:
        import obstore

        self._obstore = obstore

    def _client(self, place: str) -> Any:
        from obstore.store import from_url

        config: Any = {"aws_checksum_algorithm": "CRC64NVME", "aws_unsigned_payload": "true"}
        return from_url(place, config=config, client_options={"allow_http": True})

    def save(self, place: str) -> None:  # type: ignore[override]
        with memoryview(self.held_state.shared.map) as data:
            self._obstore.put(
                self._client(place),
                "state.bin",
                data,
                use_multipart=True,
                chunk_size=PART_BYTES,
                max_concurrency=PUTS_AT_A_TIME,
            )

    def load(self, state: BenchState, place: str) -> None:  # type: ignore[override]
        client, target = self._client(place), memoryview(state.shared.map)
        starts = iter(range(0, len(target), PART_BYTES))

        def read(_number: int) -> None:
            for start in starts:
                end = min(len(target), start + PART_BYTES)
                target[start:end] = memoryview(self._obstore.get_range(client, "state.bin", start=start, end=end))

        in_threads(GETS_AT_A_TIME, read)
        target.release()


class Blocking(StoreContender):
    """Holdfast's `save`, which returns when the checkpoint is committed, and its `load`."""

    def start(self) -> None:
        import holdfast

        self._holdfast = holdfast

    def prepare(self, place: str) -> None:
        """Prove that the bucket keeps its promise."""
        from holdfast.storage.local import open_storage

        open_storage(place).make_root()

    def save(self, place: str) -> None:  # type: ignore[override]
        self._holdfast.save(self.held_state.objects, f"{place}/step-1")

    def load(self, state: BenchState, place: str) -> None:  # type: ignore[override]
        self._holdfast.load(state.objects, f"{place}/step-1")


class Memory(io.RawIOBase):
    """A file that is ``data``, which others own: nothing is copied but what is read or written."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._data)}[whence]
        return self._at

    def readinto(self, buffer: Buffer) -> int:
        target = memoryview(buffer)
        part = self._data[self._at : self._at + len(target)]
        target[: len(part)] = part
        self._at += len(part)
        return len(part)

    def write(self, data: Buffer) -> int:
        part = memoryview(data)
        self._data[self._at : self._at + len(part)] = part
        self._at += len(part)
        return len(part)


class Boto3(StoreContender):
    """boto3's managed transfers, with one client for all of them."""

    def start(self) -> None:
        import boto3
        from boto3.s3.transfer import TransferConfig
        from botocore.config import Config

        self._client = boto3.client("s3", config=Config(s3={"addressing_style": "path"}, max_pool_connections=32))
        self._config = partial(TransferConfig, multipart_threshold=PART_BYTES, multipart_chunksize=PART_BYTES)

    def save(self, place: str) -> None:  # type: ignore[override]
        bucket, key = self._named(place)
        file = Memory(memoryview(self.held_state.shared.map))
        self._client.upload_fileobj(file, bucket, key, Config=self._config(max_concurrency=PUTS_AT_A_TIME))

    def load(self, state: BenchState, place: str) -> None:  # type: ignore[override]
        bucket, key = self._named(place)
        file = Memory(memoryview(state.shared.map))
        self._client.download_fileobj(bucket, key, file, Config=self._config(max_concurrency=GETS_AT_A_TIME))

    @staticmethod
    def _named(place: str) -> tuple[str, str]:
        bucket, _, prefix = place.removeprefix("s3://").partition("/")
        return bucket, f"{prefix}/state.bin"


class S3TorchConnector(StoreContender):
    """Stock DCP by the writer and the reader of s3torchconnector."""

    def start(self) -> None:
        import os

        from s3torchconnector import S3ClientConfig
        from s3torchconnector.dcp import S3StorageReader, S3StorageWriter

        options: Any = {
            "region": os.environ["AWS_REGION"],
            "s3client_config": S3ClientConfig(force_path_style=True, part_size=PART_BYTES),
        }
        self._writer, self._reader = partial(S3StorageWriter, **options), partial(S3StorageReader, **options)

    def save(self, place: str) -> None:  # type: ignore[override]
        import torch.distributed.checkpoint as dcp

        dcp.save(self.held_state.flat, storage_writer=self._writer(path=f"{place}/step-1"))

    def load(self, state: BenchState, place: str) -> None:  # type: ignore[override]
        import torch.distributed.checkpoint as dcp

        dcp.load(state.flat, storage_reader=self._reader(path=f"{place}/step-1"))


class Fsspec(S3TorchConnector):
    """Stock DCP by torch's own writer and reader for fsspec."""

    def start(self) -> None:
        import s3fs
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

        del s3fs  # found by fsspec: missing, it is to be told now
        options = {"default_block_size": PART_BYTES, "max_concurrency": PUTS_AT_A_TIME}
        self._writer, self._reader = partial(FsspecWriter, **options), partial(FsspecReader, **options)
